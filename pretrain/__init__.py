"""Pretraining: recipe, trainer, data, checkpoints, reports."""
