# SPDX-License-Identifier: Apache-2.0
"""Sampling kernels: temperature, top-k, top-p and min-p, penalties, token bitmasks, log probabilities."""
