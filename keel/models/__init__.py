"""Models: loading them, and the four roles of PPO on one backbone or on several."""
