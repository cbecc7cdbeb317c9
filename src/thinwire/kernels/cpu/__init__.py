"""Kernels that numba compiles. Importing a module of these imports numba; `dispatch` does, at the first call."""
