"""The process that holds checkpoints in the memory of a host. Standard library only: it runs without torch."""
