"""KV cache on the host: allocation of pages and slots, the prefix cache, and eviction from it."""
