"""Keel: PPO for language models that a person can run, read and trust."""
