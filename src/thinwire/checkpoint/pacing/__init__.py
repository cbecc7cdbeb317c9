"""Pacing of checkpoint bytes: in the gaps that a training leaves on its link."""
