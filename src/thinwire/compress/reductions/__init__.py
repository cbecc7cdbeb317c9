"""Reductions, which average the compressed gradients of all ranks."""
