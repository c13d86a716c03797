"""Requests, pages, radix tree, policies and the scheduler: no torch and no I/O."""
