"""What trainers of frameworks pass on to thinwire."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from torch import nn

from thinwire.integrations import attachment as attachments
from thinwire.integrations.attachment import Attachment
from thinwire.outer import diloco


def test_one_process_has_nothing_to_synchronize() -> None:
    attachment = Attachment(nn.Linear(2, 2), "", dense="lossless")
    assert attachment.synchronizer is None
    assert (attachment.stats(), attachment.per_step(), attachment.state_dict()) == ({}, {}, {})
    attachment.load(None)
    with attachment.global_parameters():
        attachment.synchronize()
    attachment.end()


@pytest.mark.parametrize(("steps", "warnings"), [(2000, 1), (6400, 0), (0, 0), (-1, 0), (float("inf"), 0)])
def test_a_trainer_that_knows_of_few_rounds_warns_once(
    steps: float, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    two_ranks = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 2, get_rank=lambda: 0)
    monkeypatch.setattr(attachments, "dist", two_ranks)
    monkeypatch.setattr(attachments, "is_sharded", lambda module: True)
    monkeypatch.setattr(attachments, "attach_outer", lambda *args, **kwargs: SimpleNamespace(stats=dict))
    with caplog.at_level(logging.WARNING, logger="thinwire"):
        Attachment(nn.Linear(2, 2), "", diloco(every=64), total_steps=steps)
    assert len(caplog.records) == warnings
    assert all("are 31 rounds of diloco(every=64)" in record.message for record in caplog.records)
