"""Rollouts: plan which groups to create and delete, and keep what a status has to remember of a rollout."""
