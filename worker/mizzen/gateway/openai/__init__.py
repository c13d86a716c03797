"""OpenAI-compatible HTTP API: JSON schemas, request parsing, response encoding, endpoints."""
