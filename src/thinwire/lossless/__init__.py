"""Exact sums of dense gradients in fewer bytes."""
