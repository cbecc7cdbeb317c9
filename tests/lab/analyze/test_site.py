"""The lines of a script that build its model, whatever statement they are, and lines that messages name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from thinwire.lab.analyze import site
from thinwire.lab.planning.measurement import DdpSite

HOOK = """
class Watched(DDP):
    def __init__(self, module, **settings):
        found.append(find_site())
"""


def run(path: Path, text: str) -> list[DdpSite]:
    """The sites of all models that a script builds, of a class that asks from within the folder of this package."""
    found: list[DdpSite] = []
    inside = str(Path(site.__file__).with_name("pretended.py"))
    namespace: dict[str, Any] = {"DDP": DistributedDataParallel, "find_site": site.find_site, "found": found}
    exec(compile(HOOK, inside, "exec"), namespace)
    path.write_text(text)
    exec(compile(text, str(path), "exec"), namespace)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def test_an_assignment_is_found_with_its_target_and_its_call(path: Path) -> None:
    text = "\nmodel = Watched(\n    net := 3,\n    bucket_cap_mb=8,\n    static_graph=True,\n)\nmodel.x = 1\n"
    assert run(path, text) == [
        DdpSite(
            file=str(path), line=2, last_line=6, inner_line=0, target="model",
            call="Watched((net := 3), bucket_cap_mb=8, static_graph=True)",
            grouped_call="Watched((net := 3), static_graph=True, bucket_cap_mb_list=plan.bucket_cap_mb_list())",
        )
    ]  # fmt: skip


@pytest.mark.parametrize("target", ["self.model", "models[0]", "model"])
def test_any_single_target_is_one(path: Path, target: str) -> None:
    text = f"class A: pass\nself, models = A(), [None]\n{target} = Watched(3)\n"
    (found,) = run(path, text)
    assert (found.line, found.target, found.call) == (3, target, "Watched(3)")
    (annotated,) = run(path, "model: object = Watched(3)")
    assert annotated.target == "model"


@pytest.mark.parametrize(
    "statement",
    ["a = b = Watched(3)", "a, b = Watched(3), 4", "models = [Watched(3)]", "Watched(3)", "a = wrap(Watched(3))"],
)
def test_what_is_no_assignment_of_the_model_has_a_line_alone(path: Path, statement: str) -> None:
    assert run(path, f"wrap = list\nwrap = lambda model: model\n{statement}\n") == [
        DdpSite(file=str(path), line=3, last_line=3)
    ]


def test_of_a_function_that_returns_the_model_its_caller_is_named(path: Path) -> None:
    text = "def build(net):\n    return Watched(net)\n\ndef twice(net):\n    return build(net)\n\nmodel = twice(3)\n"
    (found,) = run(path, text)
    assert (found.line, found.last_line, found.inner_line) == (7, 7, 2)
    assert (found.target, found.call, found.grouped_call) == ("model", "twice(3)", "twice(3)")


def test_a_script_that_cannot_be_read_has_its_line(path: Path) -> None:
    (found,) = run(path, "import os; os.unlink(__file__) if '__file__' in globals() else None\nmodel = Watched(3)\n")
    assert found.target == "model"
    namespace = {"find_site": site.find_site}
    exec(compile("\n\nfound = find_site()", str(path.with_name("gone.py")), "exec"), namespace)
    assert namespace["found"] == DdpSite(file=str(path.with_name("gone.py")), line=3)


def test_messages_have_the_line_and_its_text(path: Path) -> None:
    text = "first = calling_line()\nsecond = [calling_line(), 'a text that is longer than anyone wants to read']\n"
    path.write_text(text)
    namespace: dict[str, Any] = {"calling_line": site.calling_line}
    exec(compile(text, str(path), "exec"), namespace)
    assert namespace["first"] == "line 1 of train.py, `first = calling_line()`"
    where, _, shown = namespace["second"][0].partition(", `")
    assert where == "line 2 of train.py"
    assert shown.endswith("...`")
    assert len(shown) == 60 + 4
    gone = {"calling_line": site.calling_line}
    exec(compile("\nsaid = calling_line()", "<stdin>", "exec"), gone)
    assert gone["said"] == "line 2 of <stdin>"


def test_of_several_statements_in_a_line_the_one_that_runs_is_named(path: Path) -> None:
    text = "é = 'é'; model = Watched(3); said = calling_line(); last = 1\nfor i in [calling_line()]: pass; last = i\n"
    path.write_text(text)
    namespace: dict[str, Any] = {"calling_line": site.calling_line, "Watched": lambda net: None}
    exec(compile(text, str(path), "exec"), namespace)
    assert namespace["said"] == "line 1 of train.py, `said = calling_line()`"
    assert namespace["last"] == "line 2 of train.py", "and none where it is no statement of its own"
    (found,) = run(path, "net = 3; model = Watched(net); net = 1\n")
    assert (found.line, found.target, found.call) == (1, "model", "Watched(net)")


class Model:
    """What is asked of a model of DDP."""

    def __init__(self, find_unused_parameters: bool, static_graph: bool) -> None:
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph


@pytest.mark.parametrize(
    ("unused", "static", "expected"), [(False, False, True), (True, False, False), (True, True, True)]
)
def test_buckets_follow_a_plan_where_all_parameters_have_gradients(unused: bool, static: bool, expected: bool) -> None:
    model: Any = Model(unused, static)
    assert site.follows_plans(model) is expected
