"""`torch.distributed.checkpoint` beside checkpoints in memory: the tier on disk, and its reader and writer in
memory."""
