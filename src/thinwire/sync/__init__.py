"""Exact synchronization: every rank ends with the same sum, and nothing is lost."""
