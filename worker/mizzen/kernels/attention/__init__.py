"""Attention kernels: split-KV decode, QK norm with RoPE, page indices."""
