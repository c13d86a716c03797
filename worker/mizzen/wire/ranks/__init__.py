# SPDX-License-Identifier: Apache-2.0
"""Channels inside an engine: step plans from rank 0 to the other ranks, and messages between nodes."""
