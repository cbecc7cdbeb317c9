"""Emulated hosts on rate-limited links, N ranks on one machine, and faults at (rank, step)."""
