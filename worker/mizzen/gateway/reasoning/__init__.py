"""Reasoning: the part of an answer that a model thinks before it speaks."""
