"""Training: the stages of a run, and the pipeline that goes through them."""
