"""Kernels for a GPU; importing one of these modules imports Triton, as `dispatch` does at the first CUDA tensor.

Only what has a caller with CUDA tensors is here. The host waits for the device in `nonzero_rows`, `sum_rows` and the
kernels of floats, once, and in no other function.
"""
