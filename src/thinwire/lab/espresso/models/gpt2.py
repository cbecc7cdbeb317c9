"""GPT2 small on WikiText-2, 80 tokens: 12 layers of width 768 (Radford et al., 2019)."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.lab.espresso.models.model import ModelParameter, PublishedModel, backward_order
from thinwire.lab.espresso.models.transformer import affine, embedding, layer_norm

_LAYERS, _WIDTH, _INNER, _TOKENS = 12, 768, 3072, 80
_VOCABULARY, _POSITIONS = 50257, 1024


def gpt2() -> PublishedModel:
    """Return GPT2 small: 148 tensors, 474.70 MiB of the published 475.

    The token embedding is also the output layer. Its gradient is complete with that of the embedding, last of all; the
    product at the output comes before the first gradient, from which the published time counts.
    """
    return PublishedModel(
        name="gpt2",
        parameters=backward_order(_forward()),
        backward_total_seconds=0.2113,
        published_tensors=148,
        published_mebibytes=475,
        algorithm="ef_sign_sgd",
        cpu_gbit=20.0,
        source="Espresso (EuroSys'23), tables 4 and 5; backward 211.3 ms, processors 20 Gbit/s: its public simulator",
    )


def _forward() -> Iterator[ModelParameter]:
    yield from embedding("transformer.wte", _VOCABULARY, _WIDTH, _TOKENS)
    yield from embedding("transformer.wpe", _POSITIONS, _WIDTH, _TOKENS)
    for layer in range(_LAYERS):
        yield from _layer(f"transformer.h.{layer}")
    yield from layer_norm("transformer.ln_f", _WIDTH, _TOKENS)


def _layer(name: str) -> Iterator[ModelParameter]:
    yield from layer_norm(f"{name}.ln_1", _WIDTH, _TOKENS)
    yield from affine(f"{name}.attn.c_attn", _WIDTH, 3 * _WIDTH, _TOKENS)
    yield from affine(f"{name}.attn.c_proj", _WIDTH, _WIDTH, _TOKENS)
    yield from layer_norm(f"{name}.ln_2", _WIDTH, _TOKENS)
    yield from affine(f"{name}.mlp.c_fc", _WIDTH, _INNER, _TOKENS)
    yield from affine(f"{name}.mlp.c_proj", _INNER, _WIDTH, _TOKENS)
