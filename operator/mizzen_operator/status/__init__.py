# SPDX-License-Identifier: Apache-2.0
"""Builds and writes the status of a service, and derives Events and metrics from it."""
