"""Text side of a model: chat templates, tokenization, incremental detokenization, stop strings."""
