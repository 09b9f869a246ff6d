"""The parts that make a step fast: attention and adaLN kernels, float8 products, activation checkpointing,
`torch.compile` of layers, CUDA graphs.

Nothing here knows a model or a job, so that a user's own loop can call it too. It imports torch, `tread.errors` and
`tread.routing`; Triton only inside the functions that launch a kernel.
"""
