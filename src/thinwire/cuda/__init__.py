"""Gradients on a GPU: from the training stream to the lane and back, by events, without the training stream waiting."""
