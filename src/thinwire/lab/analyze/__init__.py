"""Measure the sparsity of a training run, and predict from it what each scheme would send."""
