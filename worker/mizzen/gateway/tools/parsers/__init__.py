"""Incremental parsers of tool calls, one for each syntax in which models write calls."""
