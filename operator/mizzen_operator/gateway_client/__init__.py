"""Reads the routing tables of running gateways, and detects gateways that hang."""
