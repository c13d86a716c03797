"""Engine process: supervisor, ranks, health probes, metrics and drain."""
