"""A training's state as bytes, and back: layout, encoding, shards."""
