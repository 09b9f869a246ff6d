"""Training for any job: one loop, the session it steps, checkpoints, optimizers, metrics, and settings.

A job provides a `Task`. Nothing here knows a job, a dataset or a model; the package may import `config`, `routing` and
`kernels`.
"""
