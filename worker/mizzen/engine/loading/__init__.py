"""Loading an engine: options to model, memory budget, KV cache, graphs and warm-up."""
