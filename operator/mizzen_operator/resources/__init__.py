"""Builders of the manifests of all child objects. Pure, no I/O."""
