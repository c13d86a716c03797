# SPDX-License-Identifier: Apache-2.0
"""Kernels of mixtures of experts: the router, products with few and with many rows, and their weighted sum.

A *pair* is a token with one of its experts; pair `token * per_token + k` is that of the token's expert k. An
expert index outside [0, held) stands for none of this rank's experts: such a pair contributes nothing.
"""
