"""KV pages and the prefix cache: who holds each page, and which pages are cached."""
