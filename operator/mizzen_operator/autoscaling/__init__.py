"""Scales services with `spec.autoscaling`."""
