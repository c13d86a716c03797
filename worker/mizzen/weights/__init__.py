"""Reading safetensors into a model."""
