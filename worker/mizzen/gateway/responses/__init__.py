"""OpenAI's Responses API: items in, items and their events out."""
