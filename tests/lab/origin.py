"""Where the pages of tests come from."""

from __future__ import annotations

from thinwire.lab.report import Origin

ORIGIN = Origin("thinwire demo --seed 1", "thinwire 1.2.3, torch 2.9.0", "2026-01-02 03:04 UTC", "a machine, 2 cores")
