"""Decoder models: the model itself, and one short config reader per family, found by the architecture's
name."""
