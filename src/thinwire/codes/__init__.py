"""Codes of values, which give back every bit."""
