"""A script is watched from its first DDP model on; before that it may train something else, but not for long."""

from __future__ import annotations

import pytest
import torch

from thinwire.lab.analyze.failure import ScriptFailed
from thinwire.lab.analyze.recorder import MOST_BEFORE, Recorder, installed


@pytest.mark.parametrize("has_model", [False, True])
def test_what_a_script_trains_before_it_wraps_its_model_does_not_end_it(has_model: bool) -> None:
    recorder, optimizer = Recorder(1), torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with installed(recorder, "train.py"):
        for _ in range(MOST_BEFORE - 1):
            optimizer.step()
        recorder.num_models = int(has_model)
        if has_model:
            optimizer.step()
            return
        with pytest.raises(ScriptFailed, match="without DistributedDataParallel"):
            optimizer.step()
