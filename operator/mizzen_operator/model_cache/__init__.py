"""Fetches models into caches by Jobs, and reports the progress of the downloads."""
