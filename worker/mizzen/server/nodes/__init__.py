"""Coordination of the supervisors of a group of several nodes."""
