"""Benchmarking and reproduction suite for AdaptiveLoad (arXiv 2605.17923)."""

__version__ = "0.1.0"
