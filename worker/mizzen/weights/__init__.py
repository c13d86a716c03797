"""Reading safetensors checkpoints into a model."""
