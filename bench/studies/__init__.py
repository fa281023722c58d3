"""Benchmarks that each serve one page of the documentation."""
