# SPDX-License-Identifier: Apache-2.0
"""Endpoints that return vectors, scores or labels of texts instead of generating text."""
