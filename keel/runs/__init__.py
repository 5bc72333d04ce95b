"""Run folders, checkpoints, logs, signals, and what a person sees while a run works."""
