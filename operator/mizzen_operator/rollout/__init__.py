# SPDX-License-Identifier: Apache-2.0
"""Rollouts: plans which groups to create and delete, carries out the plan, and keeps the rollout state."""
