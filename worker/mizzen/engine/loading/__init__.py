"""Loading of an engine: validation of options, model, memory budget, KV cache, graphs and warm-up."""
