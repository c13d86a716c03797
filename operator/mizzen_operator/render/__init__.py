"""Builders of the objects that a service owns, one file an object family."""
