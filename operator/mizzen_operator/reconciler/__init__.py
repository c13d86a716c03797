# SPDX-License-Identifier: Apache-2.0
"""Reconciles one InferenceService: observe, plan, execute, write the status; or degraded mode."""
