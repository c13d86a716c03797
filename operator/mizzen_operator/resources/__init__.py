"""Builds the manifests of all child objects. Pure."""
