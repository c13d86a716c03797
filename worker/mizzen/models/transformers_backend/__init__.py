# SPDX-License-Identifier: Apache-2.0
"""Serves any causal language model of Transformers that uses its attention interface.

The model's own modules compute everything but attention, projections, token embedding and head, which are
Mizzen's. `model` holds the class that the engine builds, and `inspection` decides whether a model can be
served.
"""
