"""The trainer of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]

Run = Callable[..., dict[str, Any]]
PER_STEP = {f"comm/{name}_per_step" for name in ("bytes_sent", "bytes_dense", "ms", "exposed_ms")}


@pytest.fixture(scope="module")
def lightning(torchrun: Run) -> dict[str, Any]:
    return torchrun("tests/integrations/scripts/lightning_trainer.py")


class TestLightning:
    @pytest.mark.parametrize(("stock", "attached"), [("stock", "exact"), ("stock", "strategy"), ("bf16", "bf16_exact")])
    def test_losses_are_those_of_the_stock_trainer(self, lightning: dict[str, Any], stock: str, attached: str) -> None:
        assert len(lightning[stock]["losses"]) == 16
        assert lightning[stock]["steps"] == 8
        for what in ("losses", "valid", "parameters"):
            assert lightning[attached][what] == lightning[stock][what], what

    @pytest.mark.parametrize("name", ["low_rank", "strategy_low_rank"])
    def test_a_resumed_training_is_the_uninterrupted_one(self, lightning: dict[str, Any], name: str) -> None:
        """From the checkpoint of the first epoch, which rank 0 wrote for all ranks."""
        resumed = lightning[f"{name}_resumed"]
        assert resumed["losses"] == lightning[name]["losses"][8:]
        assert resumed["parameters"] == lightning[name]["parameters"]
        assert lightning[name]["losses"] != lightning["exact"]["losses"]

    def test_ranks_end_with_the_same_parameters(self, lightning: dict[str, Any]) -> None:
        first, second = lightning["ranks"]
        assert first == second

    def test_a_callback_begins_a_second_training_anew(self, lightning: dict[str, Any]) -> None:
        for what in ("losses", "valid", "parameters"):
            assert lightning["low_rank_again"][what] == lightning["low_rank"][what], what

    @pytest.mark.parametrize("name", ["exact", "strategy"])
    def test_steps_are_logged(self, lightning: dict[str, Any], name: str) -> None:
        assert set(lightning[name]["metrics"]) == PER_STEP
        sent, dense = lightning[name]["bytes"]
        assert 0 < sent < dense / 5
        assert "comm/bytes_sent_per_step" in lightning[name]["logged"]

    def test_a_callback_beside_the_strategy_is_refused(self, lightning: dict[str, Any]) -> None:
        assert lightning["refused"].startswith("this Trainer has 2 ThinwireCallbacks: leave one out")

    def test_the_table_is_there_while_it_trains(self, lightning: dict[str, Any]) -> None:
        assert {"scheme", "reason"} <= set(lightning["table"])
        assert lightning["after"] is None

    def test_fabric_saves_the_state_of_all_ranks(self, lightning: dict[str, Any]) -> None:
        found = lightning["fabric_low_rank"]
        assert found["again"] == found["losses"][3:]
        assert found["losses"] != lightning["fabric"]["losses"]
