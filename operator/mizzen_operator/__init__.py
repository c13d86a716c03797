# SPDX-License-Identifier: Apache-2.0
"""Mizzen's operator: a Kubernetes controller that reconciles InferenceServices."""
