"""The whole benchmark of trainings."""

from __future__ import annotations

from thinwire.lab.bench.train.benchmark import TrainBenchmark


def test_an_outer_loop_may_train_longer() -> None:
    benchmark = TrainBenchmark("digits", ("ddp", "diloco:longer=2.5"), hosts=2, seeds=1, steps=10, extra=0.5)
    assert (benchmark.steps_of("ddp"), benchmark.max_steps_of("ddp")) == (10, 15)
    assert (benchmark.steps_of("diloco:longer=2.5"), benchmark.max_steps_of("diloco:longer=2.5")) == (25, 37)
