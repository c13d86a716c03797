"""Access to the API server: client, in-memory store of watched objects, server-side apply, drift."""
