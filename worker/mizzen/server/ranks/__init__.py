"""Rank processes of an engine: entry points, shared memory, monitoring and failure detection."""
