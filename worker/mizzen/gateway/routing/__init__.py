"""Routing: choice of an engine for each request, retries and resumes on other engines, cache warm-up."""
