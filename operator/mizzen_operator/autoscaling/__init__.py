# SPDX-License-Identifier: Apache-2.0
"""Changes `spec.replicas` of services with `spec.autoscaling` according to their load."""
