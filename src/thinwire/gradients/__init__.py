"""Where gradients come from: the places at which thinwire plugs into stock PyTorch."""
