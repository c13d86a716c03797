"""The gateway's view of engines: discovery, routing table, connections, health and verification."""
