"""Steps of a training: what the gradients of one are summed by, timed, and saved with."""
