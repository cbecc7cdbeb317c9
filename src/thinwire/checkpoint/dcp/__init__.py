"""In-memory checkpoints and `torch.distributed.checkpoint`: the tier on disk, and a reader and writer in memory."""
