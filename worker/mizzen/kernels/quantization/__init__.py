# SPDX-License-Identifier: Apache-2.0
"""Kernels that quantize the inputs of products, and that restore weights of the fragment layout."""
