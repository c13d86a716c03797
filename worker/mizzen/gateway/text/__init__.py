"""Chat templates, tokenizing, incremental detokenizing, stop strings."""
