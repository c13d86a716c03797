# SPDX-License-Identifier: Apache-2.0
"""KV cache on the host: allocation of pages and slots, the prefix cache, and eviction from it."""
