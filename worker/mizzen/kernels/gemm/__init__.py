"""GEMM kernels for small batches, and fused gate-up SwiGLU."""
