"""Models in their caches: a Job fetches them, and the status reports the progress."""
