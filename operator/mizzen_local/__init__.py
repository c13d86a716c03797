"""A Kubernetes cluster on one machine, without containers, for laptops and tests."""
