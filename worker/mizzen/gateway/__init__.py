"""The OpenAI-compatible front: tokenizes, routes, detokenizes."""
