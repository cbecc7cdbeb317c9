"""`thinwire bench checkpoint`: what checkpoints cost a training, and what they save when it is killed."""
