"""Importing this loads every kernel: the server that ranks are forked from does, so that no rank has to.

Loading takes a second of processor time, which 8 ranks on two cores would wait 4 seconds for.
"""

from __future__ import annotations

import torch

from thinwire.kernels.warm import warm_up

torch.set_num_threads(1)  # a forked process has none of the threads that a server might have started
warm_up()
