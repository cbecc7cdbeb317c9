"""Parameters of the layers of BERT and GPT2."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.lab.espresso.models.model import ModelParameter


def affine(name: str, features_in: int, features_out: int, tokens: int) -> Iterator[ModelParameter]:
    yield ModelParameter(f"{name}.weight", (features_in, features_out), tokens)
    yield ModelParameter(f"{name}.bias", (features_out,), tokens)


def layer_norm(name: str, width: int, tokens: int) -> Iterator[ModelParameter]:
    yield ModelParameter(f"{name}.bias", (width,), tokens)
    yield ModelParameter(f"{name}.weight", (width,), tokens)


def embedding(name: str, rows: int, width: int, tokens: int) -> Iterator[ModelParameter]:
    """Yield the weight of an embedding.

    Its backward adds one row a token, so it counts as tokens * width, not as a product with the whole table.
    """
    yield ModelParameter(f"{name}.weight", (rows, width), tokens / rows)
