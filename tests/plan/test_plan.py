"""`thinwire.plan.plan`: plans survive their file, refuse what they are not for, and say what they do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import thinwire
from compressors import COMPRESSORS, FEEDBACK
from thinwire import compress, schemes
from thinwire.compress.assign import EXACT, LeaveSmall, Method, assign, leave_small
from thinwire.compress.base import Exchanged, Parameter
from thinwire.compress.wrappers import core_of
from thinwire.lab.cli.main import app
from thinwire.plan.plan import STOCK, VERSION, Candidate, Group, Plan, fingerprint

PARAMETERS = (
    Parameter("fc2.bias", (10,)),
    Parameter("fc2.weight", (10, 512)),
    Parameter("fc1.bias", (512,)),
    Parameter("fc1.weight", (512, 1024)),
)


def plan_of(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "world_size": 8,
        "fingerprint": fingerprint(PARAMETERS),
        "groups": (
            Group(("fc2.bias", "fc2.weight"), 20_520),
            Group(("fc1.bias", "fc1.weight"), 2_099_200, "top_k:density=0.01", "all_gather"),
        ),
        "predicted_seconds": 0.08,
        "dense_seconds": 0.38,
        "other_seconds": 0.02,
        "choice": "top_k:density=0.01 by all_gather, cupcake",
        "candidates": (Candidate("top_k:density=0.01 by all_gather, cupcake", 0.08), Candidate(STOCK, 0.38)),
        "created": "2026-01-02T03:04:05+00:00",
    }
    return Plan(**(fields | changes))


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_of().save(path)
    assert Plan.load(path) == plan_of()
    assert json.loads(path.read_text())["version"] == VERSION
    assert thinwire.Plan is Plan


names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12, unique=True)
seconds = st.floats(0.0, 1e6, allow_nan=False)


@pytest.mark.slow
@given(names, st.integers(1, 4096), seconds, seconds, seconds, st.booleans(), st.text(max_size=20))
def test_every_plan_survives_json(
    parameters: list[str], ranks: int, predicted: float, dense: float, other: float, fallback: bool, note: str
) -> None:
    groups = tuple(Group((name,), place, "bf16" if place % 2 else None) for place, name in enumerate(parameters))
    plan = plan_of(
        world_size=ranks,
        groups=groups,
        predicted_seconds=predicted,
        dense_seconds=dense,
        other_seconds=other,
        fallback=fallback,
        note=note,
        candidates=(),
    )
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def from_file(group: Group) -> Group:
    return Group(**json.loads(json.dumps(group.to_json())))


exchanges = st.sampled_from(["auto", "all_gather", "two_shot", "zen", "two_level:zen", schemes.ZEN, schemes.AGSPARSE])
compressors = st.sampled_from([*COMPRESSORS.values(), *FEEDBACK.values(), compress.dgc(0.1, steps_per_epoch=9)])
methods = st.one_of(st.sampled_from(EXACT), compressors, st.builds(lambda one, by: one.by(by), compressors, exchanges))
values = methods | st.builds(
    leave_small, compressors, st.integers(0, 9999), st.integers(0, 3), rest=st.sampled_from(EXACT)
)


@given(values, st.booleans())
def test_every_value_of_dense_for_a_gradient_survives_a_file(how: Method | LeaveSmall, joins: bool) -> None:
    group = from_file(Group.of(["a", "b"], 4096, how, joins))
    assert group == Group.of(["a", "b"], 4096, how, joins)
    for parameter in PARAMETERS:
        expected = how(parameter) if isinstance(how, LeaveSmall) else how
        expected = expected.by("auto") if isinstance(expected, compress.Compressor) else expected
        assert group.method(parameter) == expected


@given(st.lists(methods, min_size=len(PARAMETERS), max_size=len(PARAMETERS)))
def test_what_travels_by_a_plan_is_what_its_parameters_were_given(hows: list[Method]) -> None:
    """As `sync.methods` has it; error feedback is added on both sides."""
    each = dict(zip((parameter.name for parameter in PARAMETERS), hows, strict=True))
    groups = [from_file(Group.of([name], 4, how, index > 0)) for index, (name, how) in enumerate(each.items())]
    assert assign(plan_of(groups=tuple(groups)).dense(), PARAMETERS) == assign(each, PARAMETERS)


class Mine(compress.Identity):
    name = "mine"


HOSTS = schemes.TwoLevel(schemes.ZEN, hosts=((0, 1), (2, 3)))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (Mine(), "mine is none that the constructors of thinwire.compress make"),
        (compress.top_k(0.1).by(HOSTS), "no str"),
        (compress.top_k(0.1).by(replace(schemes.ZEN, seed=7)), r"exchange=Scheme\(.*, no str"),
        (lambda parameter: "native", "leave_small got <function"),
        ("zen", "dense='zen'; legal are native, lossless, auto"),
        (leave_small(compress.bf16(), rest=compress.top_k(0.1)), r"dense=top_k\(0.1\)"),
    ],
)
def test_what_has_no_text_is_no_group_of_a_plan(how: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Group.of(["a"], 4, how)


def test_a_file_has_what_earlier_versions_read_unless_a_group_needs_more() -> None:
    first = ["parameters", "size_bytes", "compressor", "exchange"]
    assert list(Group.of(["a"], 4, leave_small(compress.bf16())).to_json()) == first
    assert list(Group.of(["a"], 4, compress.bf16()).to_json()) == [*first, "min_elements", "min_dimensions"]
    assert Group.of(["a"], 4, "auto").to_json()["dense"] == "auto"


JOINED = (
    Group(("fc2.weight",), 20_480, "power_sgd", "all_reduce"),
    Group(("fc2.bias",), 40, joins=True),
    Group(("fc1.bias", "fc1.weight"), 2_099_200, "top_k:density=0.01", "all_gather"),
)


def test_a_group_may_join_the_job_of_the_one_before() -> None:
    plan = plan_of(groups=JOINED)
    assert plan.jobs == (("fc2.weight", "fc2.bias"), ("fc1.bias", "fc1.weight"))
    assert [round(cap * 1024 * 1024) for cap in plan.bucket_cap_mb_list()] == [20_520, 2_099_200]
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert "exact, all_reduce, with the group before: fc2.bias" in plan.explain()


def test_a_plan_without_joint_jobs_is_one_that_earlier_versions_read() -> None:
    assert all("joins" not in group for group in plan_of().to_json()["groups"])


def test_the_fingerprint_is_of_names_shapes_and_dtypes_in_any_order() -> None:
    same = fingerprint(PARAMETERS[::-1])
    assert same == fingerprint(PARAMETERS)
    others = [
        PARAMETERS[1:],
        (replace(PARAMETERS[0], name="fc3.bias"), *PARAMETERS[1:]),
        (replace(PARAMETERS[0], shape=(1, 10)), *PARAMETERS[1:]),
        (replace(PARAMETERS[0], dtype=torch.bfloat16), *PARAMETERS[1:]),
    ]
    assert len({same, *map(fingerprint, others)}) == 5


def test_a_plan_is_for_one_model_and_world_size() -> None:
    plan = plan_of()
    plan.check(PARAMETERS[::-1], 8)
    with pytest.raises(ValueError, match=r"for 8 ranks, and there are 4: make one with `thinwire plan --measure"):
        plan.check(PARAMETERS, 4)
    with pytest.raises(ValueError, match=r"does not know 1 of this model's parameters, such as 'extra'"):
        plan.check([*PARAMETERS, Parameter("extra", (1,))], 8)
    with pytest.raises(ValueError, match=r"1 of its parameters are not here, such as 'fc2.bias'"):
        plan.check(PARAMETERS[1:], 8)
    with pytest.raises(ValueError, match=r"same names, but other shapes or dtypes"):
        plan.check([*PARAMETERS[:-1], Parameter("fc1.weight", (1024, 512))], 8)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 2}, "version 2, and this thinwire reads version 1"),
        ({"world_size": 0}, "at least one rank"),
        ({"predicted_seconds": -1.0}, r"predicted_seconds=-1.0, no float of at least 0"),
        ({"dense_seconds": float("nan")}, "dense_seconds=nan"),
        ({"world_size": 2.0}, "world_size=2.0, no int of at least 0"),
        ({"world_size": True}, "world_size=True"),
        ({"fallback": "no"}, "fallback='no', no bool: make one"),
        ({"note": 3}, "note=3"),
        ({"groups": ()}, "no groups"),
        ({"groups": (Group(("a",), joins=True),)}, "joins the group before it, and there is none"),
        ({"groups": (Group(("a",)), Group(("b", "a")))}, "parameter 'a' is in the plan twice"),
    ],
)
def test_what_is_no_plan_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan_of(**changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parameters": ()}, "has no parameters"),
        ({"size_bytes": -1}, "size_bytes=-1"),
        ({"size_bytes": float("nan")}, "size_bytes=nan, no int of at least 0"),
        ({"parameters": "a"}, "has no parameters, but 'a'"),
        ({"parameters": ["a", 3]}, r"has no parameters, but \['a', 3\]"),
        ({"exchange": 3}, "exchange=3, no str"),
        ({"compressor": 3}, r"compressor=3, no str \| None"),
        ({"compressor": "bf16", "exchange": "all_reduc"}, r"unknown exchange 'all_reduc'; .* mean 'all_reduce'\?"),
        ({"compressor": "top_k", "exchange": "two_level:nope"}, "unknown exchange 'two_level:nope'"),
        ({"compressor": "power_sgd:warm_start=no"}, "power_sgd has warm_start=no: pass a number, True or False"),
        ({"dense": "exact"}, "dense='exact'; legal are native, lossless, auto"),
        ({"joins": "no"}, "joins='no'"),
        ({"compressor": "top_q"}, "unknown compressor 'top_q'"),
        ({"compressor": "error_feedback:inner=top_q"}, "unknown compressor 'top_q'"),
        ({"compressor": "top_k:density=2"}, "density"),
        ({"compressor": "bf16", "min_elements": -1}, "min_elements=-1"),
    ],
)
def test_what_is_no_group_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Group(**({"parameters": ("a",)} | changes))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no plan, which is a JSON file"),
        ("[" * 99_999, "is no plan, which is a JSON file"),
        ('{"version": 1, "groups": [{"parameters": ["a"], "compressor": "bf16", "exchange": "x"}]}', "exchange 'x'"),
        ("[]", "not a plan that this thinwire reads"),
        ('{"version": 7}', "version 7, and it should be 1"),
        ('{"version": 1}', "a damaged plan"),
        ('{"version": 1, "groups": [{"parameters": ["a"], "colour": "red"}]}', "a damaged plan"),
    ],
)
def test_what_is_no_file_of_a_plan_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as error:
        Plan.load(path)
    assert "thinwire plan --measure --output plan.json" in str(error.value)
    assert str(error.value).startswith(str(path)), "and it names the file"


def test_a_file_of_an_editor_that_writes_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_of().to_json()), encoding="utf-8-sig")
    assert Plan.load(path) == plan_of()


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the plan .*none.json: No such file"):
        Plan.load(tmp_path / "none.json")


def test_small_parameters_of_a_compressed_group_stay_exact() -> None:
    found = assign(plan_of().dense(), PARAMETERS)
    assert {name for name, method in found.items() if isinstance(method, Exchanged)} == {"fc1.weight"}
    assert core_of(found["fc1.weight"].compressor) == thinwire.compress.top_k(0.01)


def test_plans_of_earlier_versions_are_read_but_for_groups_that_are_one_tensor() -> None:
    saved = plan_of().to_json()
    assert "ahead" not in saved
    assert "fallback" not in saved
    assert Plan.from_json({**saved, "ahead": True}) == plan_of()
    with pytest.raises(ValueError, match="groups as one flat tensor, which was removed"):
        Plan.from_json({**saved, "ahead": False})


def test_caps_are_the_bytes_of_the_groups_exactly() -> None:
    """As DDP reads them: ``int(cap * 1024 * 1024)``."""
    sizes = [1, 3, 4_097, 26_214_401, 2**31 + 1]
    groups = tuple(Group((str(size),), size) for size in sizes)
    assert [int(cap * 1024 * 1024) for cap in plan_of(groups=groups).bucket_cap_mb_list()] == sizes


def test_a_plan_explains_itself() -> None:
    assert plan_of().explain() == (
        "Plan for 8 ranks and 4 parameters, 2.1 MB of gradients, made 2026-01-02T03:04:05+00:00\n"
        "Take top_k:density=0.01 by all_gather, cupcake. Predicted step: 100.0 ms; stock DDP: 400.0 ms, 4.00 times as"
        " long.\n"
        "It is lossy: compare the loss, too. The best exact way is stock DDP: 400.0 ms.\n"
        "\n"
        "group  parameters  gradients  what happens\n"
        "    1           2      21 kB  exact, all_reduce: fc2.bias .. fc2.weight\n"
        "    2           2     2.1 MB  top_k:density=0.01, all_gather: fc1.bias .. fc1.weight\n"
        "\n"
        "  seconds  candidates, from the start of backward until the last gradient is there\n"
        "  80.0 ms  top_k:density=0.01 by all_gather, cupcake  <- taken\n"
        " 380.0 ms  stock DDP\n"
    )


def test_a_plan_that_does_nothing_says_so() -> None:
    plan = plan_of(choice=STOCK, predicted_seconds=0.38)
    assert plan.does_nothing
    assert plan.speedup == 1.0
    verdict = "Do nothing: no exact way is better than stock DDP by more than 3 %, and no lossy one by 30 %."
    assert f"\n{verdict} Predicted step: 400.0 ms.\n" in plan.explain()


def test_show_prints_what_a_plan_explains(tmp_path: Path) -> None:
    path, copy = tmp_path / "plan.json", tmp_path / "copy.json"
    plan_of().save(path)
    result = CliRunner().invoke(app, ["plan", "show", str(path), "--json", str(copy)])
    assert result.exit_code == 0, result.output
    assert result.output == plan_of().explain()
    assert Plan.load(copy) == plan_of()
    refused = CliRunner().invoke(app, ["plan", "show", str(tmp_path / "none.json")])
    assert refused.exit_code == 2
    assert "cannot read the plan" in refused.output
