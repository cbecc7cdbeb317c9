"""Espresso's decisions for published models, at scale."""
