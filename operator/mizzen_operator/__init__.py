"""Mizzen's operator: a Kubernetes controller that reconciles InferenceServices."""
