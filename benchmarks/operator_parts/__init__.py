"""Parts of benchmarks/operator_scale.py."""
