"""The doctor: a diagnosis of a training, the lines to paste, and its page."""
