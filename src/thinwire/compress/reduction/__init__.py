"""How the compressed gradients of all ranks become their mean."""
