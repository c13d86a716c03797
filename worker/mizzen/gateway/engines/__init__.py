"""Engines as the gateway sees them: discovery, connections, health, circuit breakers, verification and the
routing table."""
