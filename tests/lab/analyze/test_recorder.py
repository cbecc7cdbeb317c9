"""A script is watched from its first DDP model on; before that it may train something else, but not for long."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

import thinwire
from thinwire.lab.analyze.failure import ScriptFailed
from thinwire.lab.analyze.recorder import MOST_BEFORE, Recorder, installed, nonzero_rows
from thinwire.lab.harmless import without_attach


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


@pytest.mark.filterwarnings("ignore:FSDP", "ignore:.*NO_SHARD")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_an_fsdp1_model_is_called_by_its_name_and_not_sent_to_ddp(use_orig_params: bool, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        device = torch.device("cpu")
        model = FullyShardedDataParallel(torch.nn.Linear(2, 2), use_orig_params=use_orig_params, device_id=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with installed(Recorder(1), "train.py"):
            for _ in range(MOST_BEFORE - 1):
                optimizer.step()
            with pytest.raises(ScriptFailed) as ended:
                optimizer.step()
        with without_attach(), pytest.raises(ValueError, match="attaches") as refused:
            thinwire.attach(model)
        for error in (ended.value, refused.value):
            assert "s a FullyShardedDataParallel, whose" in str(error)
            assert " DistributedDataParallel" not in str(error)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        (torch.tensor([[0.0, 0.0], [0.0, -1.0], [float("nan"), 0.0]]), [1, 2]),
        (torch.zeros(0, 3), []),
        (torch.tensor(2.0), [0]),
        (torch.tensor([0.0, 3.0]), [1]),
        (torch.sparse_coo_tensor([[3, 1, 3]], torch.zeros(3, 2), (5, 2), check_invariants=False), [1, 3]),
        (torch.sparse_coo_tensor([[1, 0], [0, 2]], torch.ones(2), (2, 3), check_invariants=False), [2, 3]),
    ],
)  # fmt: skip
def test_nonzero_rows(gradient: Tensor, expected: list[int]) -> None:
    assert nonzero_rows(gradient).tolist() == expected
