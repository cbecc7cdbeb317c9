"""Methods by name: schemes, compressors and their settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from thinwire.compress.named import NAMES as COMPRESSORS
from thinwire.lab.bench.jobs.named import get_job
from thinwire.lab.bench.train.methods import (
    OUTER_METHODS,
    SETTINGS,
    TORCH_METHODS,
    method_of,
    parse,
)
from thinwire.lab.doctor.advice import expression, method
from thinwire.plan.plan import Group, Plan
from thinwire.sums.named import NAMED


def test_settings_are_read_from_the_name_of_a_method() -> None:
    assert parse("top_k:density=0.001:values=x") == ("top_k", {"density": 0.001, "values": "x"})
    with pytest.raises(ValueError, match="NAME=VALUE"):
        parse("top_k:0.001")


@pytest.mark.parametrize("name", [*TORCH_METHODS, *SETTINGS, *NAMED, *OUTER_METHODS])
def test_every_setting_fits_its_constructor(name: str) -> None:
    method_of(name, get_job("lstm"), steps=100, world_size=2)


def test_names_that_are_left_out_stay_exact() -> None:
    matrix = torch.empty(64, 64)
    method = method_of("top_k:leave=words*", get_job("gpt"), steps=100, world_size=2)
    assert not method.compresses("words.weight", matrix)
    assert method.compresses("blocks.0.attention_in.weight", matrix)


@pytest.mark.parametrize("text", ["top_k:density=0.5 by two_shot", "diloco:codec=top_k:density=0.5 by two_shot"])
def test_an_exchange_is_written_as_doctor_and_plan_write_it(text: str) -> None:
    _, settings = parse(text)
    codec = settings.get("codec", text)
    assert method(codec).exchange == "two_shot"
    assert expression(codec) == 'thinwire.compress.top_k(density=0.5).by("two_shot")'
    method_of(text, get_job("lstm"), steps=100, world_size=2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("top_k:warm_up=0.1:density=0", "density"),
        ("zip", "legal are ddp, bf16"),
        ("top_k:densty=1", "densty"),
        ("ddp:rank=4", "no setting 'rank'"),
        ("ddp:fuse=cupcake", "no setting 'fuse'"),
        ("thinwire:fuse=cupcakes", "cupcakes"),
        ("plan:policy=cupcake", "plan has no setting 'policy'"),
        ("plan:file=/nowhere/plan.json", "cannot read the plan /nowhere/plan.json"),
        ("plan:/nowhere/plan.json", "cannot read the plan /nowhere/plan.json"),
        ("plan:compressors=sidco", "sidco"),
        ("diloco:density=0.01", "unexpected keyword argument 'density'.* behind codec=, as in diloco:every=32:codec="),
        ("diloco:every=0", "every is 0: pass"),
        ("diloco:inner_lr=0", "inner_lr of diloco is a factor above 0 for the learning rate of the job"),
        ("diloco:longer=x", "longer of diloco is a factor above 0 for the number of steps"),
        ("plan:fallback=false", "fallback of plan is 'false': pass True or False"),
        ("lossles", "Did you mean 'lossless'"),
        ("zen:rows=auto", "zen has no setting 'rows'"),
        ("zen:dense=losless", "unknown dense 'losless'; legal are native, lossless, auto. Did you mean 'lossless'"),
        ("diloco:codec=zip", "unknown compressor 'zip'; legal are acp_sgd, "),
        ("diloco:codec=dgc", "codec=dgc has momentum, and so has the outer optimizer"),
        ("diloco:codec=momentum_correction:inner=top_k", "has momentum, and so has the outer optimizer"),
        ("diloco:codec=top_k:densty=1", "densty"),
        ("diloco:codec=top_k:values=qsgd(2)", "a setting is NAME=VALUE"),
        ("diloco:codec=top_k:decay=x", "decay of codec=top_k is a number"),
        ("diloco:codec=top_k:warm_up=0.1", "codec=top_k has no warm_up: there are rounds"),
        ("shadow_sync:algorithm=adam", "adam"),
        ("shadow_sync:every=32", "'every'"),
        ("top_k by two_shots", "unknown exchange 'two_shots'.* Did you mean 'two_shot'"),
        ("top_k:exchange=two_shot", "exchange"),
        ("zen by two_shot", "zen has no exchange here: a compressor has one, as in top_k:density=0.01 by two_shot"),
        ("bf16 by all_gather", "bf16 has no exchange here"),  # the hook of torch, by this name
        ("plan by two_shot", "plan has no exchange"),
        ("diloco by two_shot", "diloco has no exchange"),
        ("diloco:codec=top_k by two_shots", "unknown exchange 'two_shots'"),
        ("ddp:codec=top_k", "ddp has no codec=, which outer loops have: local_sgd, diloco"),
    ],
)
def test_unknown_methods_and_settings(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        method_of(text, get_job("lstm"), steps=100, world_size=2)


def test_each_compressor_without_momentum_is_a_codec() -> None:
    codecs = [name for name in COMPRESSORS if name not in ("dgc", "sign_sgd")]
    assert "bf16" in codecs
    for name in codecs:
        text = f"diloco:codec={name}" + ":value=0.1" * (name == "threshold")
        assert method_of(text, get_job("gpt"), steps=100, world_size=2).is_plain


@pytest.mark.parametrize(
    ("text", "is_plain", "has_plan"),
    [
        ("thinwire", False, False),
        ("exact", False, False),
        ("thinwire:fuse=byte_cap(mb=4;first_mb=1)", True, False),
        ("top_k:density=0.01:fuse=layerwise", True, False),
        ("qsgd:fuse=safusion(adapt=False)", True, False),
        ("plan", False, True),
        ("plan:compressors=bf16+top_k(density=0.01):fallback=True", False, True),
    ],
)
def test_groups_need_a_plain_module_and_a_plan_decides(text: str, is_plain: bool, has_plan: bool) -> None:
    method = method_of(text, get_job("lstm"), steps=100, world_size=2)
    assert (method.is_plain, method.planning is not None) == (is_plain, has_plan)


def test_a_plan_for_another_number_of_ranks_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan(2, "", (Group(("fc.weight",), 4096),), 1.0, 1.0).save(path)
    method_of(f"plan:{path}", get_job("lstm"), steps=100, world_size=2)
    with pytest.raises(ValueError, match="for 2 ranks, and there are 4: give --hosts 2"):
        method_of(f"plan:{path}", get_job("lstm"), steps=100, world_size=4)


@pytest.mark.parametrize(
    "text",
    [
        "error_feedback:inner=top_k(density=0.01;values=qsgd(bits=4)):decay=0.9",
        "warm_up:inner=top_k:steps=5",
        "ef21:inner=power_sgd(rank=0.1)",
        "threshold:value=0.1",
        "double_exponential",
        "Identity",
    ],
)
def test_every_text_of_a_compressor_is_a_method(text: str) -> None:
    """Plan files and ``--compress`` have the same texts."""
    method = method_of(text, get_job("gpt"), steps=100, world_size=2)
    assert method.compresses("fc.weight", torch.empty(64, 64))
    assert method.optimizer_momentum == (not text.startswith("ef21")), "which has the momentum"
    if method.optimizer_momentum:
        assert method_of(f"diloco:codec={text}", get_job("gpt"), steps=100, world_size=2).is_plain


def test_every_scheme_is_a_method_and_says_how_other_gradients_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(thinwire, "attach", lambda *arguments: given.append(arguments))
    for text in ("zen", "two_level:zen", "zen:dense=lossless", "thinwire:dense=native", "lossless"):
        method_of(text, get_job("lstm"), steps=100, world_size=2).attach(None, None)  # type: ignore[arg-type]
    assert [arguments[1:] for arguments in given] == [
        ("zen", "auto"), ("two_level:zen", "auto"), ("zen", "lossless"), ("auto", "native"), ("auto", "lossless")
    ]  # fmt: skip
