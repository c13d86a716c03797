"""Scheduler, KV pages, prefix cache and policies: no torch and no I/O."""
