"""The kinds of faults, by where they strike."""
