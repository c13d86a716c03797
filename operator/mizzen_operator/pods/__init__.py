# SPDX-License-Identifier: Apache-2.0
"""Reads engine and gateway pods into plain values; nothing here writes to the cluster or keeps state."""
