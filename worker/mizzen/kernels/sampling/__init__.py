"""Sampling kernels: temperature, top-k and top-p, penalties, token masks, log probabilities."""
