# SPDX-License-Identifier: Apache-2.0
"""Conversion between text and tokens: chat templates, tokenizers, detokenizers and stop strings."""
