"""Training: the run, its step, its state and the loop."""
