"""Conversion of a training's state to bytes and back: layout, encoding, shards."""
