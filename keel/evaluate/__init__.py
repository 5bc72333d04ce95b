"""Evaluation: before against after on held-out prompts, intervals, and the picture of the curves."""
