"""x"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.lab.report import Origin

if TYPE_CHECKING:
    pass

ORIGIN = Origin("thinwire demo --seed 1", "thinwire 1.2.3, torch 2.9.0", "2026-01-02 03:04 UTC", "a machine, 2 cores")
