"""Kernels that numba compiles; importing one of these modules imports numba, as `dispatch` does at the first call."""
