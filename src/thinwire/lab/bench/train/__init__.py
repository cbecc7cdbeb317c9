"""`thinwire bench train`: one training under many ways to synchronize its gradients."""
