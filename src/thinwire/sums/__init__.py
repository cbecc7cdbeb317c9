"""Exact sums: every rank ends with the same one, and nothing is lost."""
