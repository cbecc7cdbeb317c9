"""Sums of real dense gradients: recorded from a job, by each method, with the bits that a value takes."""
