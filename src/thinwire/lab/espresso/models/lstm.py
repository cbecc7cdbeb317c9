"""A language model of words on WikiText-2, 80 tokens: two LSTM layers of width 1500, tied embedding (Merity et al.)."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.lab.espresso.models.model import ModelParameter, PublishedModel, backward_order
from thinwire.lab.espresso.models.transformer import embedding

_LAYERS, _WIDTH, _VOCABULARY, _TOKENS = 2, 1500, 33278, 80
_GATES = 4


def lstm() -> PublishedModel:
    """Return the LSTM language model: 10 tensors, 327.97 MiB of the published 328.

    The embedding is also the output layer, whose product comes before the first gradient: see `gpt2`.
    """
    return PublishedModel(
        name="lstm",
        parameters=backward_order(_forward()),
        backward_total_seconds=0.07145,
        published_tensors=10,
        published_mebibytes=328,
        algorithm="ef_sign_sgd",
        cpu_gbit=20.0,
        source="Espresso (EuroSys'23), tables 4 and 5; backward 71.45 ms, processors 20 Gbit/s: its public simulator",
    )


def _forward() -> Iterator[ModelParameter]:
    yield from embedding("encoder", _VOCABULARY, _WIDTH, _TOKENS)
    for layer in range(_LAYERS):
        for name in ("bias_ih_l0", "bias_hh_l0"):
            yield ModelParameter(f"rnns.{layer}.{name}", (_GATES * _WIDTH,), _TOKENS)
        for name in ("weight_hh_l0", "weight_ih_l0"):
            yield ModelParameter(f"rnns.{layer}.{name}", (_GATES * _WIDTH, _WIDTH), _TOKENS)
    yield ModelParameter("decoder.bias", (_VOCABULARY,), _TOKENS)
