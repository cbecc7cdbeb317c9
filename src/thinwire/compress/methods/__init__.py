"""Compressors of single tensors, one file for each family."""
