"""`thinwire.lab.planning.planner`: what is priced, by which clock, and what is taken of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from measured import codec, measurement, option, table
from thinwire import fuse
from thinwire.comm.process_group import ring_all_reduce_bytes, sparse_all_reduce_bytes
from thinwire.lab.cli.main import app
from thinwire.lab.cli.plan import COMPRESSORS, names_of
from thinwire.lab.planning.lane_search import fastest_jobs
from thinwire.lab.planning.measurement import DdpSite, Measurement
from thinwire.lab.planning.planner import (
    LOSSY_WORTH,
    MIXED,
    ROWS,
    Option,
    best_option,
    best_plan,
    equivalent_profile,
    in_turn,
    jobs_of,
    plan_of,
    price_options,
    stock_option,
    usual_groups,
)
from thinwire.plan.plan import STOCK, WORTH, Plan
from thinwire.plan.policy import Policy, counts_bytes, default_policies
from thinwire.plan.profile import Groups
from thinwire.plan.timeline import iteration_seconds

TOP_K = "top_k:density=0.01"
SIMPLE: tuple[Policy, ...] = (fuse.layerwise(), fuse.one_bucket())


def every_grouping(count: int) -> list[Groups]:
    found = []
    for cuts in itertools.product((False, True), repeat=count - 1):
        ends = [place + 1 for place, cut in enumerate(cuts) if cut] + [count]
        found.append(tuple(tuple(range(start, end)) for start, end in itertools.pairwise([0, *ends])))
    return found


def test_groups_go_one_after_the_other_when_they_are_ready() -> None:
    """Ready after 10, 20, 30 and 40 ms; the second waits for the first, the third for its gradient."""
    measured = measurement(shapes=[(4, 4)] * 4)
    groups = ((0,), (1,), (2, 3))
    assert in_turn(measured, jobs_of(measured, groups, [0.015, 0.002, 0.1])) == pytest.approx(0.04 + 0.1)
    assert in_turn(measured, jobs_of(measured, groups, [0.05, 0.002, 0.1])) == pytest.approx(0.01 + 0.05 + 0.002 + 0.1)


costs = st.lists(st.integers(1, 600), min_size=2, max_size=8)


@given(costs, st.floats(0.0, 0.05), st.floats(5.0, 5000.0), st.floats(0.0, 0.01))
def test_policies_see_what_groups_cost_exactly(rows: list[int], backward: float, mbit: float, alpha: float) -> None:
    """The timeline of the equivalent profile is that of exact costs, where all tensors are of one kind and no floor."""
    measured = measurement(mbit, backward_seconds=backward, shapes=[(row, 8) for row in rows], alpha=alpha + 1e-6)
    exact = measured.costs()
    profile = equivalent_profile(measured, exact)
    for groups in every_grouping(len(rows))[:: 2 ** max(0, len(rows) - 5)]:
        by_costs = in_turn(measured, jobs_of(measured, groups, [exact.seconds(group) for group in groups]))
        assert iteration_seconds(profile, groups) == pytest.approx(by_costs)


@given(costs, st.floats(0.0, 0.05), st.floats(5.0, 5000.0), st.floats(0.0, 0.01))
def test_the_best_exact_way_is_the_best_of_all_groupings(
    rows: list[int], backward: float, mbit: float, alpha: float
) -> None:
    measured = measurement(mbit, backward_seconds=backward, shapes=[(row, 8) for row in rows], alpha=alpha + 1e-6)
    exact = measured.costs()
    best = min(
        in_turn(measured, jobs_of(measured, groups, [exact.seconds(group) for group in groups]))
        for groups in every_grouping(len(rows))
    )
    found = [way for way in price_options(measured, ()) if way.name != STOCK]
    assert all(way.is_exact for way in found)
    assert min(way.seconds for way in found) == pytest.approx(best)


@given(costs, st.lists(st.floats(0.0, 0.05), min_size=8, max_size=8), st.floats(5.0, 500.0), st.floats(0.0, 0.02))
def test_groups_compressed_where_it_pays_are_the_best_of_all(
    rows: list[int], backward: list[float], mbit: float, launch: float
) -> None:
    """Every grouping, with every group compressed or not."""
    count = min(5, len(rows))
    shapes = [(row, 8) for row in rows[:count]]
    slow = codec(TOP_K, "all_gather", alpha=launch)
    measured = replace(measurement(mbit, shapes=shapes, codecs=[slow]), backward_seconds=tuple(backward[:count]))
    both = (measured.costs(), measured.costs(TOP_K, "all_gather"))
    best = min(
        in_turn(
            measured,
            jobs_of(measured, groups, [both[way].seconds(group) for group, way in zip(groups, chosen, strict=True)]),
        )
        for groups in every_grouping(count)
        for chosen in itertools.product((0, 1), repeat=len(groups))
    )
    groups, chosen = fastest_jobs(measured.backward_seconds, both)
    prices = [both[way].seconds(group) for group, way in zip(groups, chosen, strict=True)]
    assert in_turn(measured, jobs_of(measured, groups, prices)) == pytest.approx(best)


def test_every_candidate_is_priced_once_and_sorted() -> None:
    measured = measurement(codecs=[codec(TOP_K, "all_gather"), codec("ef_sign_sgd", "all_gather"),
                                   codec("ef_sign_sgd", "two_shot")])  # fmt: skip
    plan = best_plan(measured, [TOP_K, "ef_sign_sgd"], SIMPLE)
    names = [candidate.name for candidate in plan.candidates]
    assert len(set(names)) == len(names)
    assert {STOCK, "exact, layerwise", "exact, one_bucket"} <= set(names)
    for compressed in (f"{TOP_K} by all_gather", "ef_sign_sgd by all_gather", "ef_sign_sgd by two_shot"):
        assert {f"{compressed}, layerwise", f"{compressed}, one_bucket"} <= set(names)
    times = [candidate.seconds for candidate in plan.candidates]
    assert times == sorted(times)
    assert plan.predicted_seconds == dict(zip(names, times, strict=True))[plan.choice]
    assert plan.dense_seconds == dict(zip(names, times, strict=True))[STOCK]


def test_on_a_slow_link_compression_is_taken() -> None:
    plan = best_plan(measurement(mbit=10), [TOP_K])
    assert plan.choice.startswith(f"{TOP_K} by all_gather")
    assert plan.speedup > 5
    assert {group.compressor for group in plan.groups} == {TOP_K}
    assert {group.exchange for group in plan.groups} == {"all_gather"}
    plan.check(measurement().parameters, 8)
    assert plan.fingerprint == measurement().fingerprint
    assert sum(group.size_bytes for group in plan.groups) == sum(measurement().size_bytes)


def test_on_a_fast_link_nothing_is_done() -> None:
    plan = best_plan(measurement(mbit=100_000, alpha=1e-5), [TOP_K])
    assert plan.does_nothing
    assert plan.predicted_seconds == plan.dense_seconds
    assert all(group.compressor is None for group in plan.groups)


def test_small_groups_that_do_not_pay_stay_exact() -> None:
    """One large matrix of six, and an encoder with a launch so long that only that one is worth it."""
    shapes = [(64, 64)] * 5 + [(2048, 1024)]
    slow = codec(TOP_K, "all_gather", alpha=0.02)
    plan = best_plan(measurement(mbit=100, shapes=shapes, codecs=[slow]), [TOP_K])
    assert plan.choice == f"{TOP_K} by all_gather where it pays"
    assert plan.groups[-1].compressor == TOP_K
    assert plan.groups[0].compressor is None
    assert plan.groups[0].exchange == "all_reduce"


def test_what_gains_little_is_not_worth_it_and_what_loses_must_gain_more() -> None:
    measured = replace(measurement(), forward_seconds=0.0, rest_seconds=0.0)

    def way(name: str, seconds: float, compressor: str | None = None) -> Option:
        return option(name, seconds, compressor, "all_gather")

    stock, exact, lossy = way(STOCK, 1.0), way("exact", 0.95), way("lossy", 0.93, TOP_K)
    assert best_option(measured, [stock, way("exact", 1 / WORTH)]) is stock
    assert best_option(measured, [stock, exact]) is exact
    assert best_option(measured, [stock, exact, lossy]) is exact  # only 2 % faster than what loses nothing
    assert best_option(measured, [stock, exact, way("lossy", 0.951 / LOSSY_WORTH, TOP_K)]) is exact
    assert best_option(measured, [stock, exact, way("lossy", 0.949 / LOSSY_WORTH, TOP_K)]).name == "lossy"
    assert best_option(measured, [stock, way("lossy", 1.001 / LOSSY_WORTH, TOP_K)]) is stock
    with_forward = replace(measured, forward_seconds=1.0)  # the same gains in a step of twice the length
    assert best_option(with_forward, [stock, exact]) is stock


def test_what_takes_no_part_in_the_choice_is_not_needed() -> None:
    measured = measurement()
    exact = best_plan(measured, ())
    assert all(group.compressor is None for group in exact.groups)
    with pytest.raises(ValueError, match="int8 by auto was not measured"):
        best_plan(measured, ["int8"])


KINDS = (codec(TOP_K, "all_gather"), codec("bf16", "all_reduce"), codec("ef_sign_sgd", "two_shot"))


@given(
    costs,
    st.lists(st.floats(0.0, 0.02), min_size=8, max_size=8),
    st.floats(5.0, 2000.0),
    st.lists(st.floats(1e-5, 0.02), min_size=3, max_size=3),
)
def test_no_plan_of_espresso_is_slower_than_one_of_groups(
    rows: list[int], backward: list[float], mbit: float, launches: list[float]
) -> None:
    kinds = [codec(kind.compressor, kind.exchange, launch) for kind, launch in zip(KINDS, launches, strict=True)]
    measured = measurement(mbit, shapes=[(row, 64) for row in rows], codecs=kinds)
    measured = replace(measured, backward_seconds=tuple(backward[: len(rows)]))
    texts = [kind.compressor for kind in kinds]
    found = {search: price_options(measured, texts, SIMPLE, search) for search in ("espresso", "groups")}
    best = {search: min(way.seconds for way in entries) for search, entries in found.items()}
    assert best["espresso"] <= best["groups"] * (1 + 1e-9)
    for way in found["espresso"]:
        plan = plan_of(way, measured, found["espresso"])
        assert sorted(plan.parameters) == sorted(measured.names)
        assert sum(group.size_bytes for group in plan.groups) == sum(measured.size_bytes)


def test_compressors_are_mixed_where_each_has_its_place() -> None:
    """Encoding by one has a launch, by the other a rate: so the large gradient takes the one, the others the other."""
    launches = [codec(TOP_K, "all_gather", 0.05, 1e-10), codec("ef_sign_sgd", "all_gather", 1e-5, 2e-8)]
    shapes = [(256, 128)] * 4 + [(2048, 1024)]
    measured = measurement(50, shapes=shapes, codecs=launches)
    plan = best_plan(measured, [TOP_K, "ef_sign_sgd"])
    assert plan.choice == MIXED
    assert {group.compressor for group in plan.groups} == {TOP_K, "ef_sign_sgd"}
    assert plan.groups[-1].parameters[-1:] == measured.names[-1:]
    assert plan.predicted_seconds < best_plan(measured, [TOP_K, "ef_sign_sgd"], search="groups").predicted_seconds


def test_an_unknown_search_is_refused() -> None:
    with pytest.raises(ValueError, match="no search 'greedy'; legal are espresso, groups"):
        best_plan(measurement(), [TOP_K], search="greedy")


def test_embedding_tables_are_named_in_the_plan() -> None:
    plan = best_plan(measurement(tables=[table()]), ())
    assert "1 embedding table is not in the plan" in plan.note
    assert plan.note in plan.explain()


def test_stock_ddp_pays_for_every_row_of_a_dense_table() -> None:
    without, with_table = (stock_option(measurement(tables=tables)).seconds for tables in ([], [table()]))
    wire = ring_all_reduce_bytes(table().size_bytes, 8) * 8e-6 / 100
    assert with_table - without == pytest.approx(wire, rel=0.01)


def test_stock_ddp_gathers_the_rows_of_a_sparse_table() -> None:
    without, with_table = (stock_option(measurement(tables=tables)).seconds for tables in ([], [table(is_sparse=True)]))
    wire = sparse_all_reduce_bytes([200] * 8, 0, 256) * 8e-6 / 100
    assert with_table - without == pytest.approx(wire + 3e-3, rel=0.01)  # and three collectives


def test_a_model_with_tables_is_told_to_attach_and_nothing_else() -> None:
    """Rows of a table cost a tenth of it, and no compressor loses less."""
    measured = measurement(tables=[table()], shapes=[(64, 64)])
    found = price_options(measured, ["bf16"])
    best = best_option(measured, found)
    assert (best.name, best.is_plain, best.is_exact) == (ROWS, True, True)
    assert found[0].seconds > 3 * best.seconds
    (job,) = measured.row_jobs
    assert job.sent_bytes < ring_all_reduce_bytes(table().size_bytes, 8) / 5
    assert best.seconds >= job.wire_seconds


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_model_of_tables_alone_has_two_ways(is_sparse: bool) -> None:
    measured = replace(measurement(tables=[table(is_sparse=is_sparse)]), parameters=(), backward_seconds=())
    found = price_options(measured, [TOP_K])
    assert [way.name for way in found] == [STOCK, ROWS]
    plan = plan_of(found[1], measured, found)
    assert plan.jobs == ()
    assert Plan.from_json(plan.to_json()) == plan
    assert best_plan(measured, [TOP_K]).choice == (ROWS if not is_sparse else best_option(measured, found).name)
    assert Measurement.from_json(measured.to_json()) == measured


def test_buckets_that_were_seen_are_those_of_stock_ddp() -> None:
    """Whatever caps the script asked for: two buckets, the table in the first."""
    names = measurement().names
    buckets = ((*names[:3], "words.weight"), names[3:])
    measured = replace(measurement(tables=[table(ready_seconds=0.005)]), ddp=DdpSite(buckets))
    assert [group.parameters for group in stock_option(measured).groups] == [names[:3], names[3:]]
    assert usual_groups(measured.whole())[0] == (0, 1, 2, 3)


def test_of_ways_that_are_about_as_fast_the_one_that_loses_less_is_taken() -> None:
    measured = replace(measurement(), forward_seconds=0.0, rest_seconds=0.0)

    def way(compressor: str, seconds: float, is_plain: bool = True) -> Option:
        return option(f"{compressor} {seconds}", seconds, compressor, "all_gather", is_plain=is_plain)

    stock = option(STOCK, 1.0, is_plain=True)
    rivals = [way(TOP_K, 0.2), way("power_sgd", 0.205), way("bf16", 0.55)]
    assert best_option(measured, [stock, *rivals]).compressors == ("power_sgd",)
    assert best_option(measured, [stock, *rivals[:1], way("power_sgd", 0.27)]).compressors == (TOP_K,)
    with_plan = way(TOP_K, 0.195, is_plain=False)
    assert best_option(measured, [stock, way(TOP_K, 0.2), with_plan]).is_plain, "a plan has to be worth its file"


def test_the_same_measurement_gives_the_same_plan() -> None:
    again = Measurement.from_json(measurement().to_json())
    assert best_plan(measurement(), [TOP_K, "bf16"]) == best_plan(again, [TOP_K, "bf16"])


def test_stock_ddp_has_the_buckets_of_ddp() -> None:
    shapes = [(256, 1000), (32, 1024), (6_500, 1_000), (100, 1_000), (10, 10)]  # 1.02, 0.13, 26, 0.4 MB
    measured = measurement(shapes=shapes)
    stock = price_options(measured, (), SIMPLE)[0]
    assert stock.name == STOCK
    names = measured.names
    assert [group.parameters for group in stock.groups] == [names[:2], names[2:4], names[4:]]
    assert {group.exchange for group in stock.groups} == {"all_reduce"}


def test_a_bucket_of_stock_ddp_asks_nobody() -> None:
    measured = measurement(shapes=[(64, 64)])
    stock, fused = price_options(measured, (), SIMPLE)[:2]
    assert fused.seconds - stock.seconds == pytest.approx(measured.link.round.alpha)


def policies_by(kind: bool) -> Sequence[str]:
    return [policy.name.partition(":")[0] for policy in default_policies() if counts_bytes(policy) is kind]


def test_caps_count_bytes_and_searches_count_costs() -> None:
    assert set(policies_by(True)) == {"byte_cap"}
    assert {"cupcake", "mg_wfbp", "omgs", "safusion"} <= set(policies_by(False))
    assert counts_bytes(fuse.safusion(adapt=False))


def test_by_default_the_optimizer_says_what_is_considered() -> None:
    assert names_of(COMPRESSORS) is None
    assert names_of("none") == ()
    sparse, dense = "top_k:density=0.01", "qsgd:bits=8"
    codecs = [codec(text, exchange) for text, exchange in ((sparse, "all_gather"), (dense, "two_shot"))]
    measured = measurement(10, codecs=codecs)

    def considered(optimizer: str) -> set[str | None]:
        return {
            text for way in price_options(replace(measured, optimizer=optimizer)) for text in way.compressors if text
        }

    assert considered("AdamW") == considered("") == considered("Adagrad + SGD") == {dense}
    assert considered("SGD") == {dense, sparse}
    asked = price_options(measured, [sparse])
    assert {text for option in asked for text in option.compressors if text} == {sparse}


def test_five_percent_do_not_buy_a_way_that_loses_more() -> None:
    def way(name: str, seconds: float, compressor: str | None = None) -> Option:
        return option(name, seconds, compressor, is_plain=True)

    measured = replace(measurement(), forward_seconds=0.0, rest_seconds=0.0)
    found = [way(STOCK, 1.0), way("bf16", 0.55, "bf16"), way("power_sgd", 0.300, "power_sgd")]
    assert best_option(measured, [*found, way("top_k", 0.283, TOP_K)]).name == "power_sgd"
    assert best_option(measured, [*found[:2], way("qsgd", 0.44, "qsgd:bits=8")]).name == "bf16", "1.25 times"
    near = [way("bf16", 0.83, "bf16"), way("qsgd", 0.73, "qsgd:bits=8"), way("power_sgd", 0.69, "power_sgd")]
    assert best_option(measured, [found[0], *near]).name == "qsgd", "bf16 is 1.2 times as fast as stock"


def test_a_step_of_several_synchronizations_costs_as_many() -> None:
    once = measurement(100)
    thrice = replace(once, passes=3, synchronizations=3)
    assert thrice.all_backward_seconds == pytest.approx(3 * once.all_backward_seconds)
    for way, single in zip(price_options(thrice, [TOP_K]), price_options(once, [TOP_K]), strict=True):
        assert way.seconds == pytest.approx(3 * single.seconds)
        assert way.wire_seconds == pytest.approx(3 * single.wire_seconds)
    accumulated = replace(once, passes=4, rest_seconds=0.3)
    assert best_plan(accumulated, ()).dense_seconds == pytest.approx(best_plan(once, ()).dense_seconds)


def test_the_plan_command_says_what_the_compressors_of_a_plan_lost(tmp_path: Path) -> None:
    measured, figures = tmp_path / "measured.json", tmp_path / "out.json"
    replace(measurement(20), optimizer="AdamW").save(measured)
    arguments = ["plan", "--from", str(measured), "--compress", TOP_K, "--json", str(figures)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "In our own trainings: loss +29 % (gpt, AdamW, 300 steps)." in " ".join(result.output.split())
    loss = json.loads(figures.read_text())["loss"]
    assert (loss["job"], loss["optimizer"], loss["source"]) == ("gpt", "AdamW", "docs/guides/compression.md")
