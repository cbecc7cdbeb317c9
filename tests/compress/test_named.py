"""`thinwire.compress.named`: every compressor that the constructors make has a text, of which an equal one is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressors import COMPRESSORS
from thinwire import compress
from thinwire.compress.base import Compressor, Parameter
from thinwire.compress.named import CONSTRUCTORS, NAMES, parse, split, text_of
from thinwire.compress.wrappers import code_of

PARAMETER = Parameter("fc.weight", (10, 512))
DENSITIES = st.floats(1e-6, 0.2)
CODES = st.one_of(
    st.builds(compress.qsgd, st.integers(2, 8), st.integers(1, 4096), norm=st.sampled_from(["max", "l2"])),
    st.builds(compress.int8, st.integers(1, 512), stochastic=st.booleans(), seed=st.integers(0, 9)),
    st.builds(compress.mxfp8, st.sampled_from(["e4m3", "e5m2"]), stochastic=st.booleans(), seed=st.integers(0, 9)),
    st.builds(compress.lossless),
    st.builds(compress.bf16),
)
SPARSIFIERS = st.one_of(
    *(st.builds(make, DENSITIES, values=st.none() | CODES) for make in (compress.top_k, compress.redsync)),
    st.builds(compress.sidco, DENSITIES, distribution=st.sampled_from(["exponential", "gamma", "pareto"])),
    st.builds(compress.threshold, st.floats(1e-9, 1e9)),
    st.builds(
        compress.deep_reduce,
        st.builds(compress.top_k, DENSITIES),
        st.sampled_from(["huffman", "auto", "bloom:p2", "bloom:p0:0.001234567"]),
        st.sampled_from(["raw", "polynomial"]) | CODES,
    ),
)
FORGETFUL = SPARSIFIERS | st.builds(
    compress.power_sgd, st.integers(1, 8) | st.floats(0.01, 0.9), seed=st.integers(0, 3)
)
WRAPPED = st.one_of(
    FORGETFUL,
    st.builds(compress.error_feedback, FORGETFUL, st.floats(0.0, 1.0)),
    st.builds(compress.warm_up, st.builds(compress.error_feedback, FORGETFUL), st.integers(5, 9), st.just(1.0)),
    st.builds(
        compress.momentum_correction, SPARSIFIERS, st.floats(0.0, 0.9), nesterov=st.booleans(), masking=st.booleans(),
        clip_norm=st.none() | st.floats(0.1, 9.0),
    ),
    st.builds(compress.dgc, DENSITIES, warm_up_epochs=st.integers(0, 5), steps_per_epoch=st.none() | st.just(9)),
    st.builds(compress.ef_sign_sgd, st.floats(0.0, 1.0), st.none() | st.sampled_from([8, 64])),
)  # fmt: skip


def check(compressor: Compressor) -> None:
    again = parse(text_of(compressor))
    assert again == compressor
    assert repr(again) == repr(compressor)


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_every_public_compressor_is_made_again_from_its_text(name: str) -> None:
    check(COMPRESSORS[name])


@given(WRAPPED)
def test_wrappers_and_codes_of_values_with_any_settings_are_made_again_from_their_text(compressor: Compressor) -> None:
    check(compressor)


def test_a_text_has_the_settings_that_are_not_defaults() -> None:
    texts = {
        "top_k": compress.top_k(),
        "int8:stochastic=True:seed=3": compress.int8(stochastic=True, seed=3),
        "ef_sign_sgd:block=None": compress.ef_sign_sgd(block=None),
        "ef21:inner=power_sgd(rank=0.12)": compress.ef21(compress.power_sgd(0.12)),
        "warm_up:inner=error_feedback(inner=top_k(values=qsgd(bits=4;bucket=64));decay=0.9):steps=5": compress.warm_up(
            compress.error_feedback(compress.top_k(values=compress.qsgd(4, 64)), 0.9), 5
        ),
        "deep_reduce:sparsifier=top_k(density=0.1):index=bloom(p2;0.001):values=polynomial": compress.deep_reduce(
            compress.top_k(0.1), "bloom:p2:0.001", "polynomial"
        ),
        "Identity": compress.Identity(),
    }
    assert {text_of(compressor): compressor for compressor in texts.values()} == texts
    assert split("error_feedback:inner=top_k(density=0.1;values=qsgd(bits=2)):decay=0.5") == (
        "error_feedback", {"inner": "top_k(density=0.1;values=qsgd(bits=2))", "decay": 0.5}
    )  # fmt: skip


@dataclass(frozen=True)
class Mine(compress.Identity):
    name = "mine"


@dataclass(frozen=True)
class MyTopK(type(compress.top_k())):  # type: ignore[misc]
    factor: float = 2.0


@pytest.mark.parametrize("compressor", [Mine(), MyTopK(0.1), compress.error_feedback(MyTopK(0.1))])
def test_a_compressor_of_the_users_own_has_no_text(compressor: Compressor) -> None:
    with pytest.raises(ValueError, match="is none that the constructors of"):
        text_of(compressor)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("topk", "unknown compressor 'topk'; legal are acp_sgd"),
        ("top_k:0.1", "a setting is NAME=VALUE"),
        ("top_k:colour=1", "compressor top_k does not take these settings"),
        ("error_feedback", "does not take these settings.*'inner'"),
        ("error_feedback:inner=top_q(density=0.1)", "unknown compressor 'top_q'"),
        ("warm_up:inner=top_k", "does not take these settings.*'steps'"),
        ("top_k:values=qsgd(bits=2", r"unknown compressor 'qsgd\(bits=2'"),
        ("top_k:values=" + "(" * 999, "unknown compressor"),
        ("top_k:density=" + "-" * 99_999 + "1", "density"),
        ("top_k:values=__import__('os')", "a setting is NAME=VALUE"),
        ("__import__:name=os", "unknown compressor"),
        ("power_sgd:warm_start=false", "power_sgd has warm_start=false: pass a number, True or False"),
        ("dgc:nesterov=false", "nesterov=false"),
        ("power_sgd:rank=x", "rank=x"),
    ],
)
def test_a_text_without_sense_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text)


def test_names_of_constructors_that_need_no_other_compressor() -> None:
    assert parse("top_k:density=0.001:values=bf16").name == "top_k(0.001, values=bf16)"
    assert split("qsgd:bits=4:x=y") == ("qsgd", {"bits": 4, "x": "y"})
    coded = [code_of(parse(name)) for name in NAMES if name not in ("threshold", "hi_top_k")]
    sizes: set[Any] = {code.packed_bytes(PARAMETER) is not None for code in coded}  # type: ignore[attr-defined]
    assert sizes == {True, False}
    assert {*NAMES, "error_feedback", "warm_up"} < {*CONSTRUCTORS}


def test_names_differ_where_settings_decide_about_what_is_sent() -> None:
    """Ranks agree on names."""
    for one, other in (
        (compress.acp_sgd(2), compress.acp_sgd(2, start_step=1)),
        (compress.deep_reduce(index="bloom:p2:0.0012345678"), compress.deep_reduce(index="bloom:p2:0.0012345679")),
        (compress.sidco(), compress.sidco(distribution="gamma")),
        (compress.random_k(), compress.random_k(seed=1)),
        (compress.ms_top_k(), compress.ms_top_k(steps=9)),
        (compress.ok_topk(), replace(compress.ok_topk(), reselect_every=4)),
    ):
        assert one.name != other.name


@pytest.mark.parametrize("wrong", ["2", [2]])
@pytest.mark.parametrize("name", sorted(CONSTRUCTORS))
def test_a_setting_that_is_no_number_is_refused_by_its_name(name: str, wrong: object) -> None:
    """Comparisons said "'<' not supported between instances of 'float' and 'str'"."""
    make, inner = CONSTRUCTORS[name], compress.power_sgd() if name == "ef21" else compress.top_k(0.1)
    legal = {"inner": inner, "density": 0.1, "steps": 3, "value": 1.0}
    needed = {key: legal[key] for key, one in signature(make).parameters.items() if one.default is one.empty}
    for key, one in signature(make).parameters.items():
        if key != "seed" and type(legal.get(key, one.default)) in (int, float):  # many need no seed, and ignore it
            with pytest.raises(ValueError, match=key.partition("_")[0]):
                make(**{**needed, key: wrong})
