"""Observations of gradients and steps: statistics of each parameter, times of jobs, and traces."""
