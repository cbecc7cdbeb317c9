"""When checkpoint bytes travel: in the gaps that a training leaves on its link."""
