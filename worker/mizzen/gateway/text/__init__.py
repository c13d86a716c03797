"""Conversion between text and tokens: chat templates, tokenizers, detokenizers and stop strings."""
