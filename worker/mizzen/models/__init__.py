# SPDX-License-Identifier: Apache-2.0
"""Decoder models: one model class, and a config reader for each family of architectures."""
