"""The module that loads kernels into the server of ranks."""

from __future__ import annotations

import gc
import runpy

import pytest
import torch

from thinwire.lab.testbed import kernels, launch


def test_ranks_share_kernels_that_were_loaded_by_one_thread_before_the_collector_was_kept_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that kernels had started would be missing after the fork, and what comes after `freeze` is copied."""
    calls: list[object] = []
    monkeypatch.setattr(torch, "set_num_threads", lambda number: calls.append(number))
    monkeypatch.setattr(kernels, "load", lambda: calls.append("load"))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    runpy.run_module(launch._KERNELS)
    assert calls == [1, "load", "freeze"]


def test_it_is_imported_last_however_many_modules_are_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_preloaded", ["torch", launch._KERNELS])
    for module in ("json", "pytest", "json"):
        launch.preload(module)
    assert launch._preloaded == ["torch", "json", "pytest", launch._KERNELS]
    launch.leave_kernels_to_ranks()
    assert launch._preloaded == ["torch", "json", "pytest"]
