"""The InferenceService API: its typed view, labels, names of child objects, and checks. Pure, no I/O."""
