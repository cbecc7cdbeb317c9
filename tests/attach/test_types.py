"""A type checker sees the mistakes that are made most, and takes what is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

from thinwire.compress.assign import EXACT, Exact
from thinwire.rows import SchemeName
from thinwire.sums.named import AUTO, NAMED, resolve

ROOT = Path(__file__).parents[2]
HEAD = """
import torch
import thinwire
from datetime import timedelta
from thinwire import compress, fuse, outer, schemes
from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Storage

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rules = {"*.attention.*": compress.power_sgd(4), "*": "lossless"}


def rule(parameter: compress.Parameter):
    return "lossless" if parameter.numel < 1000 else compress.top_k(0.01)


class Mine:
    name = "mine"

    def groups(self, profile: thinwire.plan.Profile) -> tuple[tuple[int, ...], ...]:
        return ((0,),)

"""
WRONG = """
thinwire.attach(model, compress.top_k(0.01))
thinwire.attach(model, rows="zeen")
thinwire.attach(model, dense="zen")
thinwire.attach(model, dense="cupcake")
thinwire.attach(model, dense=compress.top_k)
thinwire.attach(model, "zen", "native", optimizer)
thinwire.attach(model, dense=lambda parameter: None)
thinwire.attach(model, dense={"*": 0.01})
thinwire.attach(model, dense={"*": fuse.cupcake()})
thinwire.attach(model, dense=schemes.ZEN)
thinwire.plan.Group.of(["fc.weight"], 4096, 0.01)
thinwire.attach(model, compress=compress.top_k(0.01))
thinwire.attach(model, exclude=3)
thinwire.attach(model, timeout=5)
thinwire.attach(optimizer)
thinwire.outer.attach(model, optimizer, outer.diloco)
thinwire.outer.attach(model, outer.diloco(every=4), optimizer)
thinwire.sparse_all_reduce(torch.ones(3), op="avg")
compress.top_k("1%")
compress.leave_small("top_k")
Checkpointer(model, optimizer, every=3)
Checkpointer(model, storage="run")
CheckpointPolicy(on_divergence="stop")
""".strip()
RIGHT = """
thinwire.attach(model, "zen", compress.top_k(0.01), optimizer=optimizer)
thinwire.attach(model, rows="two_level:zen", exclude="fc*", timeout=timedelta(seconds=3))
thinwire.attach(model, rows=schemes.ZEN, exclude=["fc*", model.weight])
thinwire.attach(model, dense="lossless", grad_scaler=torch.amp.GradScaler())
thinwire.attach(model, dense=rules)
thinwire.attach(model, dense=thinwire.attach(model, dense=rules).methods)
thinwire.attach(model, dense={"fc*": rule, "*": "native"})
thinwire.attach(model, dense=rule)
thinwire.attach(model, dense=lambda parameter: compress.dgc(0.01) if "fc" in parameter.name else "native")
thinwire.attach(model, dense=fuse.cupcake(compress.top_k(0.01)))
thinwire.attach(model, dense=Mine())
thinwire.attach(model, dense=compress.top_k(0.01).by("two_shot"))
thinwire.attach(model, dense=thinwire.Plan.load("plan.json"))
thinwire.plan.Group.of(["fc.weight"], 4096, compress.error_feedback(compress.top_k(0.01)).by(schemes.ZEN))
thinwire.plan.Group.of(["fc.weight"], 4096, compress.leave_small(compress.bf16(), rest="auto"), joins=True)
thinwire.outer.attach(model, optimizer, outer.diloco(every=4), dense={"*": "native"})
thinwire.sparse_all_reduce(torch.ones(3), "zen", "mean")
Checkpointer(model, optimizer, policy=CheckpointPolicy(max_overhead=0.02), storage=Storage("run"))
""".strip()


def test_wrong_calls_are_errors_and_right_ones_are_not(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + WRONG + "\n" + RIGHT + "\n")
    command = [Path(sys.executable).with_name("pyrefly"), "check", "--config", ROOT / "pyproject.toml"]
    options = ["--python-interpreter-path", sys.executable, "--search-path", ROOT / "src", "--output-format", "json"]
    ran = subprocess.run([*command, *options, script], capture_output=True, text=True, check=False, cwd=ROOT)
    lines = script.read_text().splitlines()
    seen = {lines[error["line"] - 1] for error in json.loads(ran.stdout)["errors"]}
    assert {*WRONG.splitlines()} - seen == set(), "mistakes that nobody sees"
    assert seen - {*WRONG.splitlines()} == set(), "errors where nothing is wrong"


def test_the_names_for_type_checkers_are_those_that_run() -> None:
    """A literal is written out, so it could miss a scheme, or have one that is refused."""
    two_levels = {"two_level:" + name for name in NAMED if name != "dense"}
    assert {*get_args(SchemeName)} == {AUTO, *NAMED, *two_levels}
    assert all(name == AUTO or resolve(name) is not None for name in get_args(SchemeName))
    assert get_args(Exact) == EXACT
