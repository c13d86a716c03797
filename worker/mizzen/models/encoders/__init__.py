# SPDX-License-Identifier: Apache-2.0
"""Encoders: models with bidirectional attention, which compute embeddings or scores of whole prompts."""
