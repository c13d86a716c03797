"""OpenAI's Responses API: convert input items to chat messages, and encode output as items and events."""
