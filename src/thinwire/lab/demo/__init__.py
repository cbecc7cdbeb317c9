"""The demonstration: one language model trained twice, by stock DDP and by thinwire, on real text."""
