"""Brings a model's files from a hub, a bucket or a registry into a folder, whole or not at all."""
