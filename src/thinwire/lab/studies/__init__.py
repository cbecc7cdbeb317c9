"""Formulas of papers, next to the library's own behaviour."""
