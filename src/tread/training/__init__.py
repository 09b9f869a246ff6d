"""Training, whatever the job: one loop, the session it steps, checkpoints, optimizers, metrics, and settings.

A job brings a `Task`. Nothing here knows a job, a dataset or a model; it may import `config`, `routing` and `kernels`.
"""
