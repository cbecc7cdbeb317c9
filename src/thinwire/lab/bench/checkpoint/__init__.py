"""`thinwire bench checkpoint`: the costs of checkpoints to a training, and their benefit when it is killed."""
