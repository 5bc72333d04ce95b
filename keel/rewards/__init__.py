"""Rewards: what scores a response, a learned model or a function."""
