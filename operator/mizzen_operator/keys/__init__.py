# SPDX-License-Identifier: Apache-2.0
"""Secrets with CURVE keys and admin tokens: creation and rotation."""
