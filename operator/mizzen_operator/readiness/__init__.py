"""Readiness of groups: golden prompts, and the pod conditions that follow from gateways' answers."""
