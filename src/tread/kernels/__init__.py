"""The parts that make a step fast or small: attention and adaLN kernels, float8 products, activation checkpointing,
`torch.compile` of layers, CUDA graphs, layers in host memory (`offload/`).

Nothing here knows a model or a job, so that a user's own loop can call it too. The package imports torch, `routing` and
its imports; Triton only inside the functions that launch a kernel.
"""
