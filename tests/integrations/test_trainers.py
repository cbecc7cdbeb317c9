"""Each trainer beside itself with one line more: equal losses, fewer bytes, statistics logged, and state resumed.

Losses are compared to the last bit: on two ranks a sum has one order. Each script trains everything in one start of
its ranks, because importing a framework takes longer than the training.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]

Run = Callable[..., dict[str, Any]]


def test_one_process_trains_as_before(python: Run) -> None:
    """Without a process group: nothing happens, and a log line says so."""
    ran = python("tests/integrations/scripts/one_process.py")
    assert ran["stdout"].count("equal losses") == 3
    assert ran["stderr"].count("one process has nothing to synchronize") == 3


@pytest.mark.parametrize(
    "script", ["hf_trainer", "sentence_transformers_xlmr", "accelerate_nlp", "lightning_recommender"]
)
def test_examples_train_and_say_what_they_sent(torchrun: Run, script: str) -> None:
    printed = torchrun(f"examples/{script}.py")["stdout"]
    assert re.search(r"loss(es)? 0\.[5-9]|loss [12]\.", printed)
    sent, dense = (int(number.replace(",", "")) for number in re.findall(r"bytes ([\d,]+) of ([\d,]+)", printed)[0])
    assert 0 < sent <= dense, "auto may leave tables to DDP, where that is faster"
