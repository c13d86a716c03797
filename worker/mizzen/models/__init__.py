"""One short file a model family, found by the architecture's name."""
