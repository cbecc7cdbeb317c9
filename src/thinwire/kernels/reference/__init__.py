"""The definition of correct for every kernel, in plain torch."""
