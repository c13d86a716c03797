"""The operator's own autoscaler: what it decides, and what writes it."""
