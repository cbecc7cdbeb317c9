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
PER_STEP = {f"comm/{name}_per_step" for name in ("bytes_sent", "bytes_dense", "ms", "exposed_ms")}


@pytest.fixture(scope="module")
def hf(torchrun: Run) -> dict[str, Any]:
    return torchrun("tests/integrations/scripts/hf_trainer.py")


@pytest.fixture(scope="module")
def lightning(torchrun: Run) -> dict[str, Any]:
    return torchrun("tests/integrations/scripts/lightning_trainer.py")


@pytest.fixture(scope="module")
def accelerate(torchrun: Run) -> dict[str, Any]:
    return torchrun("tests/integrations/scripts/accelerate_loop.py")


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


class TestAccelerate:
    @pytest.mark.parametrize(("stock", "attached"), [("stock", "exact"), ("bf16", "bf16_exact")])
    def test_losses_are_those_without_thinwire(self, accelerate: dict[str, Any], stock: str, attached: str) -> None:
        assert accelerate[stock]["steps"] == 8
        for what in ("losses", "parameters"):
            assert accelerate[attached][what] == accelerate[stock][what], what
        stats = accelerate[attached]["stats"]
        assert stats["comm/steps"] == 8
        assert 0 < stats["comm/bytes_sent"] < stats["comm/bytes_dense"] / 2

    @pytest.mark.parametrize("name", ["exact", "low_rank"])
    def test_a_resumed_training_is_the_uninterrupted_one(self, accelerate: dict[str, Any], name: str) -> None:
        assert accelerate[f"{name}_resumed"]["losses"] == accelerate[name]["losses"][8:]
        assert accelerate[f"{name}_resumed"]["parameters"] == accelerate[name]["parameters"]
        assert accelerate["low_rank"]["losses"] != accelerate["exact"]["losses"]

    def test_each_rank_has_a_file_and_one_of_all_ranks_is_read(self, accelerate: dict[str, Any]) -> None:
        """The latter from the custom checkpoint of earlier versions."""
        assert accelerate["files"] == ["thinwire-00000.pt", "thinwire-00001.pt"]
        assert accelerate["old_resumed"]["parameters"] == accelerate["low_rank"]["parameters"]

    def test_ranks_end_with_the_same_parameters(self, accelerate: dict[str, Any]) -> None:
        first, second = accelerate["ranks"]
        assert first == second

    def test_trackers_have_the_steps(self, accelerate: dict[str, Any]) -> None:
        assert PER_STEP | {"loss"} <= set(accelerate["scalars"])

    @pytest.mark.parametrize("wrong", ["not prepared", "unwrapped"])
    def test_a_model_that_is_not_prepared_is_refused(self, accelerate: dict[str, Any], wrong: str) -> None:
        assert "accelerator.prepare(model)" in accelerate["refused"][wrong]


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
