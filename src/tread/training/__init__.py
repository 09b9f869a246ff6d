"""Training, whatever the job: one loop, its checkpoints, average, optimizers, metrics, and the settings it reads.

A job brings a `Task`. Nothing here knows a job, a dataset or a model; it may import `config`, `routing` and `kernels`.
"""
