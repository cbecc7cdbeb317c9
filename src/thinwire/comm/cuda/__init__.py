"""Gradients on a GPU: to the lane and back by events, without the training stream waiting."""
