"""Espresso: its decisions against brute force, its bounds against any plan, and the paper's own bar."""

from __future__ import annotations

import random
from itertools import chain as chained
from itertools import combinations, product

import pytest

from clocks import calls_of
from espresso import offload as offloading
from espresso.engine import COMPUTE, CPU, INTER, Chain, Engine, iteration_seconds
from espresso.espresso import Strategy, espresso
from espresso.job import EspressoJob, job_of
from espresso.offload import offload
from espresso.options import DENSE, between_hosts, options
from espresso.tasks import Pricer
from espresso.testbeds import TESTBEDS, nvlink_100g, pcie_25g
from espresso.upper_bound import attainable_bound, upper_bound, without_cost
from published.cluster import Cluster
from published.costs import CompressionCosts, KernelCosts
from published.models import MODELS
from thinwire.plan.profile import Linear

pytestmark = pytest.mark.slow

ON_GPU = options(devices=("gpu",))


def random_job(seed: int, count: int | None = None) -> EspressoJob:
    numbers = random.Random(seed)

    def line(alpha: float, beta: float) -> Linear:
        return Linear(numbers.uniform(0, alpha), numbers.uniform(beta / 10, beta))

    count = numbers.randint(1, 12) if count is None else count
    sizes = [numbers.choice([1e3, 1e5, 1e6, 1e7, 5e7]) for _ in range(4)]
    kernel = KernelCosts(numbers.uniform(0, 1e-3), numbers.uniform(0, 1e-10))
    compression = CompressionCosts(
        "test",
        numbers.choice([0.02, 1 / 32, 0.25]),
        kernel,
        line(1e-4, 1e-10),
        line(1e-4, 3e-10),
        line(1e-4, 3e-10),
        numbers.choice([0.01, 1.0]),
    )
    cluster = Cluster(
        numbers.randint(1, 9), numbers.randint(1, 9), line(1e-4, 1e-9), line(1e-4, 3e-9), line(1e-4, 1e-10)
    )
    return EspressoJob(
        tuple(numbers.uniform(0, 0.02) for _ in range(count)),
        tuple(numbers.choice(sizes) for _ in range(count)),
        compression,
        cluster,
        other_seconds=0.01,
    )


def seconds_of(job: EspressoJob, choices: list) -> float:
    pricer = Pricer(job.size_bytes, job.cluster, job.compression)
    chains = [pricer.choice(option, size).chain for option, size in zip(choices, job.size_bytes, strict=True)]
    return iteration_seconds(job.backward_seconds, chains)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15))
def test_a_strategy_is_what_it_says_and_no_worse_than_doing_nothing(seed: int) -> None:
    job = random_job(seed)
    strategy = espresso(job)
    published = espresso(job, refining=False)
    assert published == espresso(job, refining=False)
    assert (published.iteration_seconds, published.refined) == (strategy.published_seconds, None)
    assert strategy.iteration_seconds == pytest.approx(seconds_of(job, list(strategy.choices)))
    assert strategy.dense_seconds == pytest.approx(seconds_of(job, [DENSE] * job.num_tensors))
    assert strategy.upper_bound_seconds <= strategy.iteration_seconds <= strategy.published_seconds
    assert strategy.published_seconds <= strategy.gpu_seconds <= strategy.dense_seconds
    again = espresso(job, rounds=3, bound=False, refining=False)
    assert again.gpu_seconds <= strategy.gpu_seconds
    assert 0 <= strategy.from_upper_bound < 1 <= strategy.speedup


@pytest.mark.parametrize("seed", range(12))
def test_espresso_beside_every_strategy_of_a_small_tree(seed: int) -> None:
    """Never better than the best, which would be a wrong timeline; on these never 10 % worse."""
    job = random_job(seed, count=4)
    tree = (between_hosts("gpu"), between_hosts("gpu", divisible=True))
    best = min(seconds_of(job, list(plan)) for plan in product((DENSE, *tree), repeat=4))
    found = espresso(job, tree, offloading=False, rounds=2, exhaustive=True).iteration_seconds
    assert best * (1 - 1e-9) <= found <= 1.1 * best


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_plan_beats_the_bounds(seed: int) -> None:
    """Whatever options, on whatever device."""
    job, numbers = random_job(100 + seed), random.Random(seed)
    tree = tuple(set(numbers.sample(options(), 400)) | set(ON_GPU) | set(options(devices=("cpu",))))
    free, attainable = upper_bound(job, ON_GPU), attainable_bound(job, tree)
    assert free <= attainable * (1 + 1e-9)
    plans = [[numbers.choice(tree) for _ in job.size_bytes] for _ in range(20)]
    plans += [[option] * job.num_tensors for option in numbers.sample(ON_GPU, 10)]
    plans += [list(espresso(job, rounds=2, bound=False, refining=False).choices)]
    for plan in plans:
        assert attainable <= seconds_of(job, plan) * (1 + 1e-9)


def test_free_compression_takes_no_time_and_the_bound_knows() -> None:
    job = random_job(7, count=6)
    free = EspressoJob(job.backward_seconds, job.size_bytes, without_cost(job.compression), job.cluster)
    assert upper_bound(job, ON_GPU) == pytest.approx(upper_bound(free, ON_GPU))
    assert espresso(free, rounds=3).iteration_seconds >= upper_bound(job, ON_GPU)


def test_the_bound_is_of_the_options_that_the_search_has() -> None:
    """Which sends uncompressed whatever gains nothing, also where the tree does not say so."""
    gained = 0
    for seed in range(40):
        job, numbers = random_job(seed, count=3), random.Random(seed)
        tree = [option for option in numbers.sample(ON_GPU, 4) if option != DENSE]
        strategy = espresso(job, tree, rounds=2)
        assert strategy.upper_bound_seconds <= strategy.iteration_seconds * (1 + 1e-9)
        gained += upper_bound(job, tree) > strategy.iteration_seconds * (1 + 1e-9)
    assert gained, "of these options alone it is beaten"


# --- Algorithm 2 ---------------------------------------------------------------------------------------------------


def random_offload(seed: int) -> tuple[Engine, list[list[int]], dict[int, Chain]]:
    """A few tensors of one or two kinds, each kind with a chain on the GPU and one on the processors."""
    numbers = random.Random(seed)
    count = numbers.randint(1, 7)
    kinds = [
        ((COMPUTE, numbers.uniform(0.1, 2)), (INTER, numbers.uniform(0.1, 4)), (COMPUTE, numbers.uniform(0, 1)))
        for _ in range(numbers.randint(1, 2))
    ]
    slower = {kind: numbers.uniform(0.1, 4) for kind in kinds}
    own = [numbers.choice(kinds) for _ in range(count)]
    moved = {
        tensor: tuple(
            (CPU, seconds * slower[kind]) if resource == COMPUTE else (resource, seconds) for resource, seconds in kind
        )
        for tensor, kind in enumerate(own)
    }
    engine = Engine([numbers.uniform(0.2, 3) for _ in range(count)], own)
    groups = [[tensor for tensor in range(count) if own[tensor] == kind] for kind in set(own)]
    return engine, groups, moved


def brute_force(engine: Engine, moved: dict[int, Chain], backward: list[float]) -> float:
    subsets = chained.from_iterable(combinations(moved, size) for size in range(len(moved) + 1))
    return min(
        iteration_seconds(backward, [moved[t] if t in subset else c for t, c in enumerate(engine.chains)])
        for subset in subsets
    )


@pytest.mark.parametrize("seed", range(60))
def test_offloading_equals_brute_force_on_small_instances(seed: int) -> None:
    engine, groups, moved = random_offload(seed)
    backward = [task.end_seconds - task.start_seconds for task in sorted(engine.served) if task.stage < 0]
    found = offload(engine, groups, moved)
    assert found.method == "subsets"
    chains = [moved[t] if t in found.tensors else c for t, c in enumerate(engine.chains)]
    assert iteration_seconds(backward, chains) <= brute_force(engine, moved, backward) * (1 + 2 * offloading.LEAST_GAIN)


@pytest.mark.parametrize("seed", range(60))
def test_lemma_1_where_communication_is_short(seed: int) -> None:
    """Of q tensors alike, the first in backward order are the best to offload."""
    numbers = random.Random(seed)
    count = numbers.randint(2, 7)
    on_gpu = ((COMPUTE, numbers.uniform(0.1, 3)), (INTER, 1e-6))
    on_cpu = ((CPU, numbers.uniform(0.1, 6)), (INTER, 1e-6))
    engine = Engine([numbers.uniform(0.2, 3) for _ in range(count)], [on_gpu] * count)
    for size in range(count + 1):
        first = engine.trial(dict.fromkeys(range(size), on_cpu))
        others = min(engine.trial(dict.fromkeys(plan, on_cpu)) for plan in combinations(range(count), size))
        assert first <= others + 1e-5  # the links take up to 7 us


def test_lemma_1_is_no_law_where_the_link_waits_for_the_first_tensor() -> None:
    """A counterexample: on the processors the first takes longer to encode, and the link has nothing else to do."""
    on_gpu, on_cpu = ((COMPUTE, 1.0), (INTER, 10.0)), ((CPU, 5.0), (INTER, 10.0))
    engine = Engine([0.5, 2.0], [on_gpu, on_gpu])
    assert engine.trial({0: on_cpu}) == 23.5
    assert engine.trial({1: on_cpu}) == 21.5


@pytest.mark.parametrize("seed", range(20))
def test_ways_to_offload_from_exact_to_quick(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, groups, moved = random_offload(seed)
    seconds = {}
    for method, subsets, counts in (("subsets", 1024, 1024), ("counts", 0, 1024), ("descent", 0, 0)):
        monkeypatch.setattr(offloading, "MAX_SUBSETS", subsets)
        monkeypatch.setattr(offloading, "MAX_COUNTS", counts)
        found = offload(engine, groups, moved)
        assert found.method == method
        seconds[method] = engine.trial({tensor: moved[tensor] for tensor in found.tensors})
    slack = 1 + 2 * offloading.LEAST_GAIN
    assert seconds["subsets"] <= seconds["counts"] * slack
    assert seconds["counts"] <= seconds["descent"] * slack
    assert seconds["descent"] <= engine.seconds


def test_offloading_takes_the_load_off_the_gpu() -> None:
    """Where the processors cost nothing compression goes there; where they cost more than they hide, none does."""
    for gbit, expect in ((1e6, True), (1e-3, False)):
        model = MODELS["bert"]()
        job = job_of(model, nvlink_100g())
        costs = job.compression
        byte_seconds = 8 / (gbit * 1e9)
        quick = CompressionCosts(
            costs.name, costs.ratio, costs.encode, costs.decode, Linear(0, byte_seconds), Linear(0, byte_seconds), 0.01
        )
        cluster = Cluster(8, 8, job.cluster.intra, job.cluster.inter)
        strategy = espresso(
            EspressoJob(job.backward_seconds, job.size_bytes, quick, cluster), bound=False, refining=False
        )
        assert strategy.offloaded is not None
        assert bool(strategy.offloaded.tensors) == expect
        assert (strategy.iteration_seconds < strategy.gpu_seconds) == expect


# --- the paper's models --------------------------------------------------------------------------------------------

# From the upper bound, in percent: within 10 as in the paper (which says 3 of GPT2, 5 of UGATIT, 7 of BERT, on NVLink),
# but for two on PCIe, of which test_relaxation proves that no plan is.
FROM_UPPER_BOUND = {
    ("vgg16", "nvlink_100g"): 2,
    ("resnet101", "nvlink_100g"): 1,
    ("ugatit", "nvlink_100g"): 3,
    ("bert", "nvlink_100g"): 3,
    ("gpt2", "nvlink_100g"): 3,
    ("lstm", "nvlink_100g"): 10,
    ("vgg16", "pcie_25g"): 10,
    ("resnet101", "pcie_25g"): 1,
    ("gpt2", "pcie_25g"): 7,
    ("bert", "pcie_25g"): 9,
    ("ugatit", "pcie_25g"): 19,
    ("lstm", "pcie_25g"): 20,
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "testbed"), FROM_UPPER_BOUND)
def test_the_papers_models(name: str, testbed: str) -> None:
    strategy = espresso(job_of(MODELS[name](), TESTBEDS[testbed]()))
    assert 0 <= 100 * strategy.from_upper_bound < FROM_UPPER_BOUND[name, testbed]
    assert strategy.speedup >= 1
    assert strategy.refined is not None
    assert strategy.refined.proven_seconds <= strategy.iteration_seconds * (1 + 1e-9)


def test_selection_is_quick() -> None:
    """Some 30 ms for 314 tensors: a few hundred calls each."""
    job = job_of(MODELS["resnet101"](), pcie_25g())
    assert calls_of(lambda: espresso(job, offloading=False, bound=False, refining=False)) < 1500 * 314


def test_users_may_forbid_a_second_encoding() -> None:
    strategy = espresso(job_of(MODELS["lstm"](), pcie_25g()), options(devices=("gpu",), max_compressions=1))
    assert max(option.compressions for option in strategy.choices) == 1


def test_a_strategy_explains_itself() -> None:
    strategy = espresso(job_of(MODELS["vgg16"](), pcie_25g()))
    text = strategy.explain()
    assert "32 tensors, 527.8 MiB, random_k, 8 hosts x 8 ranks, PCIe, 25 Gbit/s" in text
    assert f"{strategy.speedup:.2f}x" in text
    assert sum(int(line.split()[0]) for line in text.splitlines()[2:]) == 32
    assert str(DENSE) in text
    assert strategy.compressed
    assert all(strategy.choices[tensor].compressions for tensor in strategy.compressed)


def test_a_strategy_has_a_timeline_to_look_at() -> None:
    strategy: Strategy = espresso(job_of(MODELS["lstm"](), pcie_25g()))
    found = strategy.events()
    assert max(event.end_seconds for event in found) == pytest.approx(strategy.iteration_seconds)
    assert {event.track for event in found} >= {"compute", "intra", "inter"}
    assert sum(event.name == "backward" for event in found) == 10
    assert any("encode" in event.name for event in found)


@pytest.mark.parametrize("seed", range(3))
def test_one_rank_alone_has_nothing_to_do(seed: int) -> None:
    job = random_job(seed)
    alone = EspressoJob(
        job.backward_seconds, job.size_bytes, job.compression, Cluster(1, 1, Linear(1, 1), Linear(1, 1))
    )
    strategy = espresso(alone)
    assert strategy.iteration_seconds == strategy.upper_bound_seconds == pytest.approx(sum(job.backward_seconds))
    assert not strategy.compressed


def test_bad_input_is_refused() -> None:
    job = random_job(0)
    with pytest.raises(ValueError, match="at least one of each"):
        espresso(job, tree=())
    with pytest.raises(ValueError, match="at least one of each"):
        espresso(job, rounds=0)
    with pytest.raises(ValueError, match="at least one tensor"):
        EspressoJob((), (), job.compression, job.cluster)
    with pytest.raises(ValueError, match="one of each"):
        EspressoJob((1.0,), (1.0, 2.0), job.compression, job.cluster)
    with pytest.raises(ValueError, match="0 or more"):
        EspressoJob((-1.0,), (1.0,), job.compression, job.cluster)
    with pytest.raises(ValueError, match="ratio"):
        CompressionCosts("x", 1.5, *[Linear(0, 0)] * 4)
    with pytest.raises(ValueError, match="Kernel"):
        CompressionCosts("x", 0.5, 1.0, *[Linear(0, 0)] * 3)  # pyrefly: ignore [bad-argument-type]
