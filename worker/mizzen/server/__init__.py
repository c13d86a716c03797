# SPDX-License-Identifier: Apache-2.0
"""Processes of an engine: the supervisor, the ranks, their health probes, metrics and shutdown."""
