"""`thinwire bench sync`: the JSON contract, bytes to the byte, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import thinwire
from namespaces import needs_namespaces
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.lab.bench.methods import AGSPARSE_TORCH
from thinwire.lab.bench.sync import SyncBenchmark, predicted_pairs, run
from thinwire.lab.bench.trace import IndexTrace, save_trace
from thinwire.lab.cli.main import app
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link, NetAdminError
from thinwire.sums.named import AUTO

pytestmark = pytest.mark.ranks

CONTRACT = {
    "workload", "scheme", "world_size", "ranks_per_host", "link_mbit", "dtype", "bytes_sent_max",
    "bytes_predicted_max", "bytes_lower_bound", "imbalance_push", "imbalance_pull", "seconds_median",
    "seconds_p10", "seconds_p90", "seconds_wire_bound", "speedup_vs_dense", "max_abs_error",
    "bitwise_equal_across_ranks", "bytes_between_hosts_max",
}  # fmt: skip


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "sync", *arguments])


def check_rows(rows: list[dict[str, Any]], tolerance: float) -> None:
    for row in rows:
        assert row.keys() >= CONTRACT
        assert row["bytes_sent_max"] == row["bytes_predicted_max"]
        assert row["bytes_sent_max"] > 0.8 * row["bytes_lower_bound"], "one rank's share of a mean over ranks"
        assert row["max_abs_error"] <= tolerance
        assert row["bitwise_equal_across_ranks"]
        assert row["seconds_p10"] <= row["seconds_median"] <= row["seconds_p90"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        ("float32", 1e-7),
        pytest.param("bfloat16", 1e-3, marks=pytest.mark.slow),
        pytest.param("float64", 1e-15, marks=pytest.mark.slow),
    ],
)
def test_without_a_link(tmp_path: Path, dtype: str, tolerance: float) -> None:
    file = tmp_path / "out.json"
    schemes = "zen,agsparse,sparse_ps,balanced_parallelism,dense,auto,agsparse_torch"
    result = invoke(
        "--hosts", "3", "--link", "none", "--workload", "bert", "--scale", "0.05", "--repeat", "2",
        "--schemes", schemes, "--dtype", dtype, "--json", str(file),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    assert written.keys() == {"environment", "rows"}
    assert [row["scheme"] for row in written["rows"]] == schemes.split(",")
    assert all(row["link_mbit"] is None and row["seconds_wire_bound"] is None for row in written["rows"])
    # the group's own all-reduce adds sixteen-bit values in sixteen bits
    check_rows([row for row in written["rows"] if row["scheme"] != "dense"], tolerance)
    assert next(row for row in written["rows"] if row["scheme"] == "dense")["speedup_vs_dense"] == 1.0


@pytest.mark.slow
def test_json_to_standard_output_and_a_trace(tmp_path: Path) -> None:
    ids = (torch.tensor([0, 5, 9]), torch.tensor([5]), torch.tensor([], dtype=torch.int64))
    save_trace(tmp_path / "trace.npz", IndexTrace(num_rows=20, width=4, steps=(ids,)))
    result = invoke(
        "--trace", str(tmp_path / "trace.npz"), "--hosts", "3", "--link", "none", "--repeat", "1",
        "--schemes", "zen", "--json", "-",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    assert (row["num_rows"], row["width"]) == (20, 4)
    # rows 0 and 9 are on one rank, row 5 on two, of three: (3 + 1 - 2) * 2 + (3 + 2 - 2) rows of 16 bytes, over 3
    assert row["bytes_lower_bound"] == pytest.approx((2 * 2 + 3) * 16 / 3)


def test_bytes_are_predicted_also_where_auto_leaves_a_table_to_torch() -> None:
    ids = [torch.arange(10), torch.arange(5, 15)]
    hosts = ((0,), (1,))
    pairs = predicted_pairs(AUTO, AGSPARSE_TORCH, hosts, ids, 100, 4, torch.float32)
    assert pairs == predicted_pairs(AGSPARSE_TORCH, AGSPARSE_TORCH, hosts, ids, 100, 4, torch.float32)
    assert sum(pairs[0]) > 10 * (8 + 16)


@pytest.mark.slow
def test_auto_and_torchs_own_ways_are_measured_unless_others_are_asked_for() -> None:
    result = invoke("--hosts", "2", "--link", "none", "--scale", "0.002", "--repeat", "1", "--json", "-")
    assert result.exit_code == 0, result.output
    schemes = [row["scheme"] for row in json.loads(result.stdout)["rows"]]
    assert schemes == list(SyncBenchmark("lstm").methods)
    assert {"auto", "agsparse_torch", "dense"} <= set(schemes)


@pytest.mark.slow
def test_a_sweep_of_sizes_and_a_comparison_with_an_earlier_run(tmp_path: Path) -> None:
    before = str(tmp_path / "before.json")
    arguments = ["--hosts", "2", "--link", "none", "--repeat", "1", "--sizes", "200kb,1mb", "--schemes", "zen,dense"]
    first = invoke(*arguments, "--warm-up", "1", "--json", before)
    assert first.exit_code == 0, first.output
    written = json.loads(Path(before).read_text())
    assert [row["scheme"] for row in written["rows"]] == ["zen", "dense"] * 2
    assert written["environment"]["warm_up"] == 1
    for row, size in zip(written["rows"], (2e5, 2e5, 1e6, 1e6), strict=True):
        assert row["size_bytes"] == pytest.approx(size, rel=0.02)
        assert row["algbw"] == pytest.approx(row["size_bytes"] / row["seconds_median"])
        assert row["busbw"] == pytest.approx(row["algbw"] * 2 * (2 - 1) / 2)
    again = invoke(*arguments, "--compare", before)
    assert again.exit_code == 0, again.output
    assert "busbw" in again.output
    assert again.output.count("zen") >= 4, "each size in the sweep, and in the comparison"
    assert "ratio" in again.output


@pytest.mark.slow
def test_two_levels_send_fewer_bytes_off_their_hosts() -> None:
    """Without a link ranks only say where they are; torch's ring crosses hosts once for each of them."""
    result = invoke(
        "--hosts", "3", "--ranks-per-host", "2", "--link", "none", "--workload", "lstm", "--scale", "0.02",
        "--repeat", "1", "--schemes", "zen,two_level:zen,auto,agsparse_torch,dense", "--json", "-",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    zen, two_level, auto, torch_ring, dense = json.loads(result.stdout)["rows"]
    check_rows([zen, two_level, auto], 1e-7)
    assert two_level["scheme"] == two_level["chosen"] == "two_level:zen"
    assert two_level["bytes_between_hosts_max"] < 0.7 * zen["bytes_between_hosts_max"]
    assert zen["bytes_sent_max"] < zen["bytes_between_hosts_max"] < 2 * zen["bytes_sent_max"]
    for row in (torch_ring, dense):  # of the two ranks of a host one sends to the next host
        assert 0.9 * row["bytes_sent_max"] < row["bytes_between_hosts_max"] < 1.01 * row["bytes_sent_max"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workload", "gpt9"], "lstm"),
        (["--schemes", "zenn"], "legal are"),
        (["--schemes", "two_level:zenn"], "legal are"),
        (["--schemes", "two_level:dense"], "dense_ring"),
        (["--dtype", "int8"], "legal are"),
        (["--hosts", "0"], "at least one"),
        (["--link", "fast"], "100mbit"),
        (["--trace", "missing.npz"], "missing.npz"),
        (["--schemes", "agsparse_torch", "--dtype", "float16"], "leave it out"),
        (["--scale", "-1"], "scale"),
        (["--sizes", "1mb,big"], "unknown size 'big'"),
        (["--compare", "/nowhere/old.json"], "/nowhere/old.json is no result of a benchmark"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: list[str], says: str) -> None:
    result = invoke("--link", "none", *arguments)
    assert result.exit_code == 2
    assert says in result.output
    assert "Traceback" not in result.output


def test_without_the_right_to_make_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NetAdminError("emulated hosts need CAP_NET_ADMIN; run as root, or use `--link none`")

    monkeypatch.setattr(EmulatedNetwork, "__enter__", refuse)
    result = invoke("--link", "100mbit")
    assert result.exit_code == 1
    assert "CAP_NET_ADMIN" in result.output
    assert "--link none" in result.output


@needs_namespaces
@pytest.mark.slow
def test_on_a_link_the_wire_time_dominates() -> None:
    benchmark = SyncBenchmark(
        "lstm", hosts=4, link=Link.parse("50mbit"), methods=("zen", "agsparse", "dense"), repeat=3, scale=0.02
    )
    seen: list[str] = []
    rows = run(benchmark, seen.append)["rows"]
    assert len(seen) == 9
    check_rows(rows, 1e-7)
    for row in rows:
        assert 40 < row["link_mbit"] <= 50
        assert row["seconds_median"] > 0.9 * row["seconds_own_wire"], "nothing is faster than its own bytes"
    assert rows[0]["speedup_vs_dense"] > 5


def _send_by_two_levels(context: RankContext) -> tuple[int, list[int]]:
    from thinwire.all_reduce import _lane_of
    from thinwire.comm.groups import resolve_group

    indices = torch.arange(context.rank % 2, 8000, 2)[None]
    gradient = torch.sparse_coo_tensor(indices, torch.ones(4000, 64), (8000, 64), check_invariants=False)
    thinwire.sparse_all_reduce(gradient, scheme="two_level:zen")
    exchange = _lane_of(resolve_group(None)).exchange
    return exchange.traffic.sent_between_hosts_bytes, list(exchange.hosts)


@pytest.mark.slow
@needs_namespaces
def test_emulated_hosts_are_discovered_and_their_account_agrees_with_the_packets() -> None:
    with EmulatedNetwork(3, Link.parse("400mbit")) as network:
        before = [network.wire_bytes_sent(host) for host in range(3)]
        outcomes = run_ranks(_send_by_two_levels, world_size=6, ranks_per_host=2, network=network)
        on_the_wire = [network.wire_bytes_sent(host) - before[host] for host in range(3)]
    assert [outcome.value[1] for outcome in outcomes] == [[0, 0, 1, 1, 2, 2]] * 6
    for host, sent in enumerate(on_the_wire):
        accounted = sum(outcome.value[0] for outcome in outcomes[2 * host : 2 * host + 2])
        assert accounted > 2 * 2 / 3 * 8000 * 256, "all 8000 rows, there and back"
        assert 1.0 < sent / accounted < 1.12


def _send_both_ways(context: RankContext, size: int) -> None:
    dist.all_reduce(torch.zeros(size // 4))
    indices = torch.arange(0, 4000, 2)[None]
    gradient = torch.sparse_coo_tensor(indices, torch.ones(2000, 64), (4000, 64), check_invariants=False)
    thinwire.sparse_all_reduce(gradient, scheme="zen")


@pytest.mark.slow
@needs_namespaces
def test_accounts_agree_with_the_packets_on_the_link() -> None:
    """Counted bytes and the ring formula against the counter of the emulated network card: headers are about 5 %."""
    size, hosts = 4_000_000, 4
    with EmulatedNetwork(hosts, Link.parse("400mbit")) as network:
        before = [network.wire_bytes_sent(host) for host in range(hosts)]
        run_ranks(_send_both_ways, size, world_size=hosts, network=network)
        on_the_wire = [network.wire_bytes_sent(host) - before[host] for host in range(hosts)]
    rows_each_way = (hosts - 1) / hosts * 2000 * (64 * 4 + 2)
    accounted = ring_all_reduce_bytes(size, hosts) + 2 * rows_each_way
    for sent in on_the_wire:
        assert 1.0 < sent / accounted < 1.12
