"""Coordination between the supervisors of an engine that spans several nodes."""
