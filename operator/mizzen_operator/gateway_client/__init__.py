"""Asks running gateways for their routing tables, and detects gateways that hang."""
