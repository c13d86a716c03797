# SPDX-License-Identifier: Apache-2.0
"""Attention backends behind one interface."""
