"""Sources of gradients: the hooks by which thinwire plugs into stock PyTorch."""
