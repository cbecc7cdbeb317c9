"""Screens of a given width, and what is shown on them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def stored(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def printed(show: Callable[[Console], object], width: int) -> str:
    file = io.StringIO()
    show(Console(file=file, width=width, emoji=False))
    text = file.getvalue()
    assert "…" not in text
    if width >= 80:
        assert all(len(line) <= width for line in text.splitlines() if "─" in line), "a table wider than the window"
    return text


def cells_of(text: str) -> set[str]:
    """The words of a text; figures stand among them whole."""
    return set(text.split())
