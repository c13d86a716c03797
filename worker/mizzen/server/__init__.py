"""The engine's process: supervisor, ranks, health, metrics, drain."""
