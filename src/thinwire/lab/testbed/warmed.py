"""A module whose import loads every kernel, for the server that ranks are forked from, so that no rank has to.

`thinwire.kernels.warm_up` returns the seconds of loading; each rank would spend the same, all on the same cores.
"""

from __future__ import annotations

import torch

from thinwire.kernels.warm import warm_up

torch.set_num_threads(1)  # a forked process has none of the threads that a server might have started
warm_up()
