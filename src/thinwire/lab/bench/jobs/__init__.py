"""Small real trainings for `thinwire bench train`: data that every machine has, models of a few MB of gradients."""
