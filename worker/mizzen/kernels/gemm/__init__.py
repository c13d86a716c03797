# SPDX-License-Identifier: Apache-2.0
"""GEMM kernels for small batches, and fused gate-up SwiGLU."""
