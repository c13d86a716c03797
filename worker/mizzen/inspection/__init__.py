"""Says before a model is loaded whether it is served, and which memory it needs. Does not import torch."""
