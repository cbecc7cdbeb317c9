"""The trainer of transformers, and those that extend it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]

Run = Callable[..., dict[str, Any]]
PER_STEP = {f"comm/{name}_per_step" for name in ("bytes_sent", "bytes_dense", "ms", "exposed_ms")}


@pytest.fixture(scope="module")
def hf(torchrun: Run) -> dict[str, Any]:
    return torchrun("tests/integrations/scripts/hf_trainer.py")


@pytest.fixture(scope="module")
def texts(torchrun: Run) -> dict[str, Any]:
    return torchrun("tests/integrations/scripts/sentences_and_trl.py")


class TestTransformers:
    @pytest.mark.parametrize(
        ("stock", "attached"), [("stock", "exact"), ("stock", "again"), ("stock", "auto"), ("bf16", "bf16_exact")]
    )
    def test_losses_are_those_of_the_stock_trainer(self, hf: dict[str, Any], stock: str, attached: str) -> None:
        """With accumulation, clipping, evaluation, dropout, and the best model loaded at the end."""
        assert len(hf[stock]["losses"]) == 8
        assert len(hf[stock]["evaluations"]) == 2
        for what in ("losses", "norms", "evaluations", "parameters"):
            assert hf[attached][what] == hf[stock][what], what

    @pytest.mark.parametrize("name", ["exact", "low_rank"])
    def test_a_resumed_training_is_the_uninterrupted_one(self, hf: dict[str, Any], name: str) -> None:
        for what in ("losses", "norms", "evaluations", "parameters"):
            assert hf[f"{name}_resumed"][what] == hf[name][what], what

    def test_compression_changes_the_training(self, hf: dict[str, Any]) -> None:
        """Otherwise what is resumed would prove nothing."""
        assert hf["low_rank"]["losses"] != hf["exact"]["losses"]

    def test_ranks_end_with_the_same_parameters(self, hf: dict[str, Any]) -> None:
        first, second = hf["all_parameters"]
        assert first == second

    def test_losses_are_logged_with_bytes_and_milliseconds(self, hf: dict[str, Any]) -> None:
        of_losses = [entry for entry in hf["exact"]["logged"] if entry]
        assert len(of_losses) == 8
        assert all(set(entry) == PER_STEP for entry in of_losses)
        last = of_losses[-1]
        assert 0 < last["comm/bytes_sent_per_step"] < last["comm/bytes_dense_per_step"] / 2
        assert {f"train/{key}" for key in PER_STEP} <= set(hf["scalars"]), "TensorBoard has them too"

    def test_a_callback_attaches_to_the_trainer_that_trains(self, hf: dict[str, Any]) -> None:
        """Two trainers have the same callback, and the first is still there."""
        of_losses = [entry for entry in hf["again"]["logged"] if entry]
        assert len(of_losses) == 8
        assert all(set(entry) == PER_STEP for entry in of_losses)

    def test_a_checkpoint_without_state_is_told(self, hf: dict[str, Any]) -> None:
        """The training goes on, but it is another one."""
        assert hf["low_rank_lost"]["losses"][:5] == hf["low_rank"]["losses"][:5]
        assert hf["low_rank_lost"]["parameters"] != hf["low_rank"]["parameters"]
        assert any("the checkpoint has no state of thinwire" in line for line in hf["lines"])

    def test_nodes_with_disks_of_their_own_resume_what_each_rank_wrote(self, hf: dict[str, Any]) -> None:
        """With save_on_each_node."""
        assert hf["all_wrote"] == [["thinwire-00000.pt"], ["thinwire-00001.pt"]]
        assert hf["nodes"]["losses"] == hf["low_rank"]["losses"]
        assert hf["nodes_resumed"]["parameters"] == hf["nodes"]["parameters"]

    def test_a_trial_saves_in_its_own_folder(self, hf: dict[str, Any]) -> None:
        assert hf["searched"]["saved"] == [f"run-7/checkpoint-2/thinwire-0000{rank}.pt" for rank in (0, 1)]

    def test_states_are_in_the_checkpoint_that_is_pushed_to_the_hub(self, hf: dict[str, Any]) -> None:
        assert hf["searched"]["pushed"] == ["thinwire-00000.pt", "thinwire-00001.pt"]

    def test_two_callbacks_in_one_trainer_are_refused(self, hf: dict[str, Any]) -> None:
        assert hf["refused"] == "this Trainer has 2 ThinwireCallbacks: leave one out"

    def test_the_table_is_there_while_it_trains(self, hf: dict[str, Any]) -> None:
        assert hf["seen"]["tables"] == 8
        assert {"scheme", "reason"} <= set(hf["seen"]["table"])
        assert hf["seen"]["after"] is None


class TestSentencesAndTrl:
    @pytest.mark.parametrize("name", ["embedding", "embedding_bf16", "sft", "dpo"])
    def test_losses_are_those_of_the_stock_trainer(self, texts: dict[str, Any], name: str) -> None:
        assert [entry["loss"] for entry in texts[f"{name}_exact"]] == [entry["loss"] for entry in texts[name]]

    @pytest.mark.parametrize(("name", "times"), [("embedding", 5), ("embedding_bf16", 5), ("sft", 1.5), ("dpo", 1.5)])
    def test_bytes_are_fewer(self, texts: dict[str, Any], name: str, times: float) -> None:
        for entry in texts[f"{name}_exact"][1:]:
            assert entry["comm/bytes_dense_per_step"] > times * entry["comm/bytes_sent_per_step"]

    def test_a_table_keeps_its_proof_through_two_forwards(self, texts: dict[str, Any]) -> None:
        assert "several forwards" not in texts["stderr"]
        assert len(texts["embedding_low_rank"]) == 6
