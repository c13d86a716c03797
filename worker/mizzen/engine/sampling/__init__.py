"""Sampling: logits processing, token sampling, log probabilities and side outputs; eager and in graphs."""
