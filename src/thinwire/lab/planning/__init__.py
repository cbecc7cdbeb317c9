"""Measure a training, its link and its codecs, price every way to synchronize it, and choose a `thinwire.Plan`."""
