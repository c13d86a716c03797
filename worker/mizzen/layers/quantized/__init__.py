# SPDX-License-Identifier: Apache-2.0
"""Quantized weights of linear layers in one canonical form, whatever the checkpoint's format."""
