"""Building blocks that the models are made of."""
