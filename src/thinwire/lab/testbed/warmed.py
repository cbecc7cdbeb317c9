"""A module whose import loads compiled kernels, for the server that ranks are forked from, so that no rank has to.

It takes half a second; each rank would spend the same, all on the same cores. It is imported last: what the server has
by then is kept from the ranks' garbage collector, which would copy its pages (400,000 objects with torch._dynamo,
0.24 s).
"""

import gc

import torch

from thinwire.lab.testbed.kernels import load

torch.set_num_threads(1)  # a forked process has none of the threads that a server might have started
load()
gc.freeze()
