"""Decisions at run time: what is expected of each option, and what the steps of a training say."""
