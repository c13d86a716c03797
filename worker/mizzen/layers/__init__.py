"""Building blocks of models: linear layers, attention, norms, embeddings, sharding."""
