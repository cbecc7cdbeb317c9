"""Compressors of single tensors, one file a family."""
