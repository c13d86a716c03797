# SPDX-License-Identifier: Apache-2.0
"""Layers after the pooled hidden state of a model: classification heads with labels, and Dense layers."""
