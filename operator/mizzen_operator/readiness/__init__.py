"""Readiness of groups: golden prompts, and readiness gates that depend on what gateways report."""
