"""The control plane: observe, plan, execute, status."""
