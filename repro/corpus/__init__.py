"""Clips, their shapes, buckets and sequence lengths. Imports no PyTorch."""

from repro.corpus.shapes import Corpus, Shape, Tokenizer

__all__ = ["Corpus", "Shape", "Tokenizer"]
