"""Colours of a page."""

from __future__ import annotations

import pytest

from thinwire.lab import palette


def luminance(color: str) -> float:
    """Relative luminance by WCAG 2."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("color", palette.VARIABLES, ids=palette.VARIABLES.values())
def test_labels_in_every_colour_are_legible_on_white_and_on_dark(color: str) -> None:
    assert 1.05 / (luminance(color) + 0.05) >= 4.5
    assert (luminance(palette.DARK[color]) + 0.05) / (luminance("#14171c") + 0.05) >= 4.5


def test_no_two_meanings_share_a_colour() -> None:
    names = [name for name in vars(palette) if name.isupper() and isinstance(getattr(palette, name), str)]
    assert len({getattr(palette, name) for name in names}) == len(names) == len(palette.VARIABLES)
    assert len(set(palette.DARK.values())) == len(set(palette.VARIABLES.values())) == len(names)
