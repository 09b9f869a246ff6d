"""Training: one loop, its checkpoints, EMA and metrics, and the jobs that run on it."""
