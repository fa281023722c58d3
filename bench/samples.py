"""Synthetic data for training steps."""

import numpy as np

from pretrain.config import Recipe


class Tokens:
    """Samples of uniformly random tokens for a recipe, int64, [sequence_length + 1], the same for each n."""

    def __init__(self, recipe: Recipe):
        self._shape = recipe.model.sequence_length + 1
        self._vocab = recipe.model.vocab_size

    def __getitem__(self, n: int) -> np.ndarray:
        return np.random.default_rng(n).integers(0, self._vocab, self._shape)
