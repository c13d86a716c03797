# SPDX-License-Identifier: Apache-2.0
"""Rank processes of an engine: their entry points, shared memory, monitoring and failure detection."""
