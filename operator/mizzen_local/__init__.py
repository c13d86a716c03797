# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes cluster on one machine, without containers, for laptops and tests."""
