"""Loading of safetensors checkpoints into a model's parameters."""
