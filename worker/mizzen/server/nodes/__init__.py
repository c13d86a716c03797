# SPDX-License-Identifier: Apache-2.0
"""Coordination between the supervisors of an engine that spans several nodes."""
