# SPDX-License-Identifier: Apache-2.0
"""Readiness of groups: golden prompts, and readiness gates that depend on what gateways report."""
