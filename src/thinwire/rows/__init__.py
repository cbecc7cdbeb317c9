"""Rows of sparse gradients: the value that moves through all exact schemes, its partition, formats and codes."""
