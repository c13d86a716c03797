"""OpenAI's schemas and handlers."""
