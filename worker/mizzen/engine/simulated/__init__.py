"""A simulated device: real plans and device state, scripted tokens and step times, no model."""
