# SPDX-License-Identifier: Apache-2.0
"""Scheduler, scheduling policies, KV pages and prefix cache; imports no torch and does no I/O."""
