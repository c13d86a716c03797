# SPDX-License-Identifier: Apache-2.0
"""Modules that several benchmarks share."""
