"""Linear methods: how a linear layer stores its weights and multiplies by them."""
