"""Secrets with CURVE keys and admin tokens: creation and rotation."""
