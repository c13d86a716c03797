"""Routing: chooses an engine for each request, retries and resumes on others, and warms new engines'
caches."""
