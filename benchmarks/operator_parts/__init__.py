# SPDX-License-Identifier: Apache-2.0
"""Modules of operator_scale.py: API client, simulated node, and control plane with operators."""
