"""Rank processes of an engine: their entry points, shared memory, monitoring and failure detection."""
