# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: the router, the experts' weights and products, and the block that unites them."""
