"""Rollouts: plans and executes which groups to create and delete, and keeps the rollout state."""
