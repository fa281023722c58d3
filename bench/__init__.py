"""Benchmarks: ``python -m bench NAME`` from the root of the repository."""
