"""Kernels for a GPU; importing one of these modules imports Triton, as `dispatch` does at the first CUDA tensor.

Functions whose names end in ``_into`` and ``_on_device`` never wait for the device. Of them only `nonzero_rows_into`
has a twin.
"""
