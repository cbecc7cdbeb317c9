"""Outer loops by name."""

from __future__ import annotations

import torch

from thinwire import compress, outer
from thinwire.compress.named import split
from thinwire.lab.bench.jobs.named import get_job
from thinwire.lab.bench.train.methods import (
    method_of,
    parse,
)
from thinwire.lab.bench.train.outer import Outer, codec_of


def test_what_follows_codec_is_the_compressor_of_the_differences() -> None:
    text = "diloco:every=16:lr=0.5:codec=top_k:density=0.0156:values=qsgd(bits=2;bucket=64):decay=0.95"
    name, settings = parse(text)
    assert (name, settings["every"], settings["lr"]) == ("diloco", 16, 0.5)
    made, arguments = split(settings["codec"])
    code = codec_of(made, arguments)
    expected = compress.error_feedback(compress.top_k(0.0156, values=compress.qsgd(2, 64)), decay=0.95)
    assert code == expected
    assert codec_of("qsgd", {"bits": 4}) == compress.qsgd(4)
    assert codec_of("ef_sign_sgd", {"decay": 0.9}) == compress.ef_sign_sgd(0.9), "which has a decay itself"
    assert method_of(text, get_job("gpt"), steps=100, world_size=2).is_plain


def test_outer_loops_have_the_settings_of_their_recipes() -> None:
    streaming = Outer.of("streaming_diloco", {"every": 16, "inner_lr": 2})
    assert streaming == Outer(outer.diloco(every=16, fragments=4, delay=4, mix=0.5), 2.0)
    assert Outer.of("local_sgd", {}).recipe == outer.local_sgd()
    assert Outer.of("shadow_sync", {"algorithm": "bmuf"}).recipe == outer.shadow_sync("bmuf")
    assert not method_of("diloco:codec=top_k", get_job("gpt"), 100, 2).compresses("words.weight", torch.empty(64, 64))
