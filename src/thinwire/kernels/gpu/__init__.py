"""Kernels for a GPU. Importing a module of these imports Triton; `dispatch` does, at the first call with a CUDA tensor.

The names that end in ``_into`` and ``_on_device`` never wait for the device. Of them only `nonzero_rows_into` has a
twin.
"""
