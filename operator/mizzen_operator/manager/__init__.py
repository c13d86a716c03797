# SPDX-License-Identifier: Apache-2.0
"""Runs the controller on the leading replica: leader election, work queue, reconcile loop, health."""
