"""Compressors by name: ``top_k:density=0.001`` is ``top_k(density=0.001)``, as plans and command lines write it."""

import ast
from collections.abc import Callable, Mapping
from typing import Any

from thinwire import compress
from thinwire.compress.base import Compressor
from thinwire.errors import unknown

_AROUND_COMPRESSORS = {"ef21", "error_feedback", "leave_small", "momentum_correction", "redistribute", "warm_up"}

NAMES = tuple(name for name in compress.__all__ if name.islower() and name not in _AROUND_COMPRESSORS)
"""Names of the constructors of `thinwire.compress` that a text can use."""


def parse(text: str) -> Compressor:
    """Return the compressor of ``NAME`` or ``NAME:key=value:...``.

    ``values=NAME`` and ``sparsifier=NAME`` are compressors; ``(key=value;...)`` behind NAME are settings of its own.

    Raises:
        ValueError: an unknown name, or settings that the constructor does not take; the message says what is legal.

    Example:
        >>> parse("top_k:density=0.001:values=bf16").name
        'top_k(0.001, values=bf16)'
    """
    return construct(*split(text))


def split(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and settings of a text; values are Python literals, or else texts. The name is not checked.

    Raises:
        ValueError: a setting without a value.

    Example:
        >>> split("top_k:density=0.001")
        ('top_k', {'density': 0.001})
    """
    name, *pairs = text.strip().split(":")
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise ValueError(f"{text!r}: a setting is NAME=VALUE, as in top_k:density=0.001, not {pair!r}")
        settings[key] = _literal(value)
    return name, settings


def construct(name: str, settings: Mapping[str, Any]) -> Compressor:
    """Return ``thinwire.compress.NAME(**settings)``.

    Raises:
        ValueError: as in `parse`.
    """
    if name not in NAMES:
        raise unknown("compressor", name, NAMES)
    constructor: Callable[..., Compressor] = getattr(compress, name)
    try:
        return constructor(**{key: _setting(key, value) for key, value in settings.items()})
    except TypeError as error:
        raise ValueError(f"thinwire.compress.{name} does not take these settings: {error}") from error


def _setting(key: str, value: Any) -> Any:
    """Return the value of a setting: a text of another compressor is that compressor."""
    if not isinstance(value, str) or key not in ("values", "sparsifier", "index"):
        return value
    text = colons(value)
    return text if key == "index" or text == "raw" else parse(text)


def colons(text: str) -> str:
    """Return ``qsgd(bits=2;bucket=64)`` as ``qsgd:bits=2:bucket=64``: within a setting, colons would end it."""
    return text.replace("(", ":").replace(";", ":").rstrip(")")


def _literal(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
