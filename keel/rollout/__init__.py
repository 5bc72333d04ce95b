"""Rollouts: sampling responses from the policy."""
