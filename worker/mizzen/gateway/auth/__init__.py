"""Authentication and limits by API key: key files, tenants, rate limits, and the middleware that enforces
them."""
