"""Reconciles one InferenceService: observe, plan, execute, write the status; or degraded mode."""
