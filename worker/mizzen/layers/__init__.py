# SPDX-License-Identifier: Apache-2.0
"""Building blocks of models: linear layers, attention, norms, embeddings, sharding."""
