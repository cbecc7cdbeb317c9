"""Measurement of the sparsity of a training run, and prediction of the bytes that each scheme would send."""
