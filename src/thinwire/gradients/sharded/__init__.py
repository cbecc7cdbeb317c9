"""Models that FSDP2 laid out on a mesh: their gradients, and tables of which only rows travel."""
