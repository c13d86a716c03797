"""Helpers shared by gateway, engine and commands: no torch, no knowledge of requests."""
