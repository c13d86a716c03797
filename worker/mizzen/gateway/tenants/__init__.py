"""Who may ask for what, how often, and whose turn it is: API keys, their limits, and fair queueing."""
