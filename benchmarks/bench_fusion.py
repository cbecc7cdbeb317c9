"""Every fusion policy on the six published models, as Markdown: the tables of docs/guides/fusion.md.

    python benchmarks/bench_fusion.py [--repeat 5]

Iterations are simulated (`thinwire.plan.iteration_seconds`): 8 hosts with one V100 each on the testbed of the model's
figure in the Espresso paper, uncompressed through an all-reduce, and compressed on the GPU through an all-gather.
Planning times are processor time on this machine, the least of some; the other figures are the same everywhere.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable

from espresso.testbeds import TESTBEDS
from published.cluster import FLAT
from published.models import MODELS, PublishedModel
from thinwire import fuse
from thinwire.plan.policy import Policy
from thinwire.plan.profile import Groups, Linear, Profile
from thinwire.plan.timeline import iteration_seconds

HOSTS = 8
LINKS = {"vgg16": "pcie_25g", "resnet101": "pcie_25g", "lstm": "pcie_25g"}  # the others: nvlink_100g
POLICIES: tuple[Policy, ...] = (
    fuse.layerwise(),
    fuse.one_bucket(),
    fuse.byte_cap(25, first_mb=1),
    fuse.equal_count(2),
    fuse.mg_wfbp(),
    fuse.omgs(),
    fuse.safusion(),
    fuse.cupcake(),
)


def profiles(model: PublishedModel) -> dict[str, Profile]:
    """Of the uncompressed and of the compressed model."""
    cluster = TESTBEDS[LINKS.get(model.name, "nvlink_100g")](hosts=HOSTS, ranks_per_host=1)
    total = sum(model.size_bytes)

    def line(routine: str) -> Linear:
        alpha = float(cluster.seconds(FLAT, routine, 0.0))
        return Linear(alpha, (float(cluster.seconds(FLAT, routine, total)) - alpha) / total)

    return {
        "uncompressed": model.profile(None, line("all_reduce")),
        model.algorithm: model.profile(model.algorithm, line("all_gather")),
    }


def least_milliseconds(plan: Callable[[], object], repeat: int) -> float:
    taken = []
    for _ in range(repeat):
        start = time.process_time()
        plan()
        taken.append(time.process_time() - start)
    return 1e3 * min(taken)


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    heads = list(heads)
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)
    print()


def iterations(models: Iterable[PublishedModel]) -> Iterable[list[object]]:
    for model in models:
        for label, profile in profiles(model).items():
            plans: list[Groups] = [policy.groups(profile) for policy in POLICIES]
            seconds = [iteration_seconds(profile, groups) for groups in plans]
            assert seconds[-1] <= min(seconds) * (1 + 1e-9)
            yield [f"{model.name}, {label}", *(f"{1e3 * value:.1f}" for value in seconds), len(plans[-1])]


def planning(models: Iterable[PublishedModel], repeat: int) -> Iterable[list[object]]:
    for model in models:
        _, coded = profiles(model).values()
        times = [
            least_milliseconds(lambda policy=policy, profile=coded: policy.groups(profile), repeat)
            for policy in POLICIES
        ]
        yield [model.name, model.num_tensors, *(f"{value:.1f}" for value in times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    models = [make() for make in MODELS.values()]
    names = [policy.name for policy in POLICIES]
    print("Milliseconds from the start of backward until the last gradient is there:\n")
    table(["model", *names, "groups of cupcake"], iterations(models))
    print("Milliseconds to plan the compressed model:\n")
    table(["model", "tensors", *names], planning(models, repeat))


if __name__ == "__main__":
    main()
