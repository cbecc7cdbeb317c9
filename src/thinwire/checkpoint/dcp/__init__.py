"""Connection of in-memory checkpoints to `torch.distributed.checkpoint`: the tier on disk, and a reader and writer in
memory."""
