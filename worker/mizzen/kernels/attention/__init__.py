# SPDX-License-Identifier: Apache-2.0
"""Attention kernels: split-KV decode, QK norm with RoPE, page indices."""
