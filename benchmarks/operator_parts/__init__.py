"""Modules of operator_scale.py: API client, simulated node, and control plane with operators."""
