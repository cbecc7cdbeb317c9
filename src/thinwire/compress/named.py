"""Compressors by name: ``top_k:density=0.001`` is ``top_k(density=0.001)``, as plans and command lines write it."""

import ast
from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import signature
from typing import Any, TypeVar

from thinwire import compress
from thinwire.compress.base import Compressor
from thinwire.compress.papers.thresholds import SampledTopK
from thinwire.errors import unknown

T = TypeVar("T")

_WRAPPERS = ("ef21", "error_feedback", "momentum_correction", "warm_up")
NAMES = tuple(
    name for name in compress.__all__ if name.islower() and name not in (*_WRAPPERS, "leave_small", "redistribute")
)
"""Names of the constructors of `thinwire.compress` that make a compressor of no other one."""

CONSTRUCTORS: dict[str, Callable[..., Compressor]] = {
    **{name: getattr(compress, name) for name in (*NAMES, *_WRAPPERS, "Identity")},
    "sampled_top_k": SampledTopK,  # which `dgc` has inside
}
"""Constructors of compressors by the names that a text can use."""


def parse(text: str) -> Compressor:
    """Return the compressor of ``NAME`` or ``NAME:key=value:...``; `text_of` is the inverse.

    ``inner=NAME``, ``values=NAME`` and ``sparsifier=NAME`` are compressors; ``(key=value;...)`` behind NAME are
    settings of its own.

    Raises:
        ValueError: an unknown name, or settings that the constructor does not take; the message says what is legal.

    Example:
        >>> parse("error_feedback:inner=top_k(density=0.001;values=bf16):decay=0.9").name
        'error_feedback(top_k(0.001, values=bf16), 0.9)'
    """
    return construct(*split(text))


def text_of(compressor: Compressor) -> str:
    """Return the text of which `parse` makes an equal compressor, with the settings that are not defaults.

    Raises:
        ValueError: there is none, as of a class of the user's own.

    Example:
        >>> text_of(compress.error_feedback(compress.top_k(0.001, values=compress.qsgd(4))))
        'error_feedback:inner=top_k(density=0.001;values=qsgd(bits=4))'
    """
    own = _settings_of(compressor)
    for name, make in CONSTRUCTORS.items():
        if make is type(compressor) or not isinstance(make, type):
            with suppress(ValueError):
                defaults = {key: one.default for key, one in signature(make).parameters.items() if key in own}
                pairs = (_said(key, own[key]) for key, usual in defaults.items() if own[key] != usual)
                if parse(text := ":".join([name, *pairs])) == compressor:
                    return text
    raise ValueError(f"{compressor!r} is none that the constructors of thinwire.compress make, so no text names it")


def split(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and settings of a text; values are Python literals, or else texts. The name is not checked.

    Raises:
        ValueError: a setting without a value.

    Example:
        >>> split("top_k:density=0.001")
        ('top_k', {'density': 0.001})
    """
    name, *pairs = _parts(text.strip(), ":")
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
    return made("compressor", CONSTRUCTORS, name, {key: _setting(key, value) for key, value in settings.items()})


def made(what: str, constructors: Mapping[str, Callable[..., T]], name: str, settings: Mapping[str, Any]) -> T:
    """Return what the constructor of that name makes of the settings; raise ValueError as in `parse`."""
    if name not in constructors:
        raise unknown(what, name, constructors)
    for key, one in signature(constructors[name]).parameters.items():
        if isinstance(settings.get(key), str) and isinstance(one.default, (int, float)):
            raise ValueError(f"{what} {name} has {key}={settings[key]}: pass a number, True or False")
    try:
        return constructors[name](**settings)
    except TypeError as error:
        raise ValueError(f"{what} {name} does not take these settings: {error}") from error


def _settings_of(compressor: object) -> dict[str, Any]:
    """Return the settings of a compressor and of what is inside of it, by the names that constructors have for them."""
    own = getattr(compressor, "__dict__", {})
    inside = own.get("inner", own.get("selector"))
    more = {} if inside is None else {**_settings_of(inside), "sparsifier": inside}
    settings = more | own | {"stochastic": own.get("seed") is not None}
    return {key: value for key, value in settings.items() if value is not None or key not in ("seed", "values")}


def _said(key: str, value: object) -> str:
    """Return a setting as text; the settings of a compressor are in brackets."""
    text = text_of(value) if isinstance(value, Compressor) else str(getattr(value, "name", value))
    name, *inside = _parts(text, ":")
    return f"{key}={name}" + (f"({';'.join(inside)})" if inside else "")


def _setting(key: str, value: Any) -> Any:
    """Return the value of a setting: a text of another compressor is that compressor."""
    if not isinstance(value, str) or key not in ("inner", "values", "sparsifier", "index"):
        return value
    text = colons(value)
    return text if key == "index" or text == "raw" else parse(text)


def colons(text: str) -> str:
    """Return ``qsgd(bits=2;bucket=64)`` as ``qsgd:bits=2:bucket=64``: within a setting, colons would end it."""
    name, bracket, inside = text.partition("(")
    return ":".join([name, *_parts(inside[:-1], ";")]) if bracket and text.endswith(")") else text


def _parts(text: str, mark: str) -> list[str]:
    """Return what marks outside of brackets separate."""
    parts: list[str] = []
    for part in text.split(mark):
        if parts and parts[-1].count("(") > parts[-1].count(")"):
            parts[-1] += mark + part
        else:
            parts.append(part)
    return parts


def _literal(value: str) -> Any:
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(value)
    return value
