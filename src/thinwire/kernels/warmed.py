"""Importing this loads every kernel: the server that ranks are forked from does, so that no rank has to.

`thinwire.kernels.warm_up` returns what loading takes; each rank would spend as much, all at once on the same cores.
"""

from __future__ import annotations

import torch

from thinwire.kernels.warm import warm_up

torch.set_num_threads(1)  # a forked process has none of the threads that a server might have started
warm_up()
