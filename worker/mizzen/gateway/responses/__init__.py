"""OpenAI's Responses API: parses input items to chat messages, and encodes output as items and events."""
