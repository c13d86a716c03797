"""Changes `spec.replicas` of services with `spec.autoscaling` according to their load."""
