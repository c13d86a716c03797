"""Engine and gateway pods, read into plain values: no function here writes to the cluster or keeps state."""
