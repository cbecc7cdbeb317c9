"""Measure a training, its link and its codecs, for `thinwire.plan`."""
