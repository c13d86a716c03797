"""Reconciles one InferenceService: observe, plan, execute, status; degraded mode if its spec is unusable."""
