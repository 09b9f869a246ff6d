"""Numbers that `tread plan` and its page share: bytes by precision and optimizer, working memory, cards."""

GIB = 2**30
EVERY_STEP = ("none", "selective", "full")
"""`gradient_checkpointing`: false, selective, true."""
CHECKPOINTING = (*EVERY_STEP, "dense")
"""The modes of EVERY_STEP, and `dense`: full checkpointing in dense steps only."""

_OTHERS = {"all": 2, "float32": 2, "buffers": 1, "packed": -2}  # weights that quantization leaves in bf16
PRECISIONS: dict[str, dict[str, float]] = {
    "bf16": {"all": 2, "float32": 2, "buffers": 1},
    "fp32": {"all": 4, "buffers": 1},
    "int8": {**_OTHERS, "packed": -1, "rows": 4},
    "fp8": {**_OTHERS, "packed": -1, "rows": 4},
    "fp8-forward": {**_OTHERS, "packed": -1, "rows": 4},
    "fp8-matmul": {**_OTHERS, "packed": -1, "rows": 4},
    "int8-bnb": {**_OTHERS, "packed": -1, "rows": 4},
    "int4": {**_OTHERS, "packed": -1.5, "groups": 4},
    "nf4": {**_OTHERS, "packed": -1.5, "groups": 1 + 4 / 256},
}
"""Bytes of a base per element of `Model.weights`: a weight of 1 byte instead of 2 is packed at -1. Scales are float32
per row in 8 bits; a scale and a minimum in bf16 per group of 64 in int4; one byte, itself scaled, in nf4."""
SPARE = {
    name: f"spare_{round(8 * sum(sizes.get(one, 0) for one in ('all', 'packed')))}"
    for name, sizes in PRECISIONS.items()
}
"""What weights in a precision leave unused of their segments, in `Model.weights`."""
ADAPTER_PRECISIONS = ("bf16", *(name for name in PRECISIONS if name != "bf16"))
FULL_PRECISIONS = ("fp32", "bf16")

OPTIMIZERS: dict[str, dict[str, float]] = {
    "adamw": {"moments": 2},
    "adamw-bf16": {"moments": 2},
    "adamw-8bit": {"bytes": 2 + 2 * 4 / 256},
    "adamw-schedule-free": {"moments": 2},
    "lion": {"moments": 1},
    "lion-8bit": {"bytes": 1 + 4 / 256},
    "prodigy": {"moments": 4},
    "muon": {"moments": 1},
    "adafactor": {"bytes": 0.1},
}
"""State per trained weight: `moments` in the weight's precision, or `bytes`; 8-bit ones have a scale per 256 weights,
adafactor's rows and columns are a few percent of the weights, and nearly all weights are matrices, of which muon keeps
one momentum."""

CARDS = (12, 16, 24, 48, 80)
"""Memory of common GPUs in GB."""
RESERVED = 1.0
"""GiB of a card that a run cannot use: the CUDA context and the allocator's fragmentation."""
SLOTS = 2
"""Offloaded layers resident on the GPU at once; a copy of tread.kernels.offload's, which would import torch."""
WORKING = {"bytes": 0.4 * GIB, "layer": 0.3, "graphs": 0.06, "other_graphs": 0.55}
"""What a step holds beside, fitted to the H200's rows: some bytes, a share of what a layer without checkpointing saves
for the gradients in its backward, with CUDA graphs a share of the activations, and, where dense steps follow routed
ones, a share of the activations that they have more, because they cannot use all of that pool."""
APART_BYTES = 4
"""Compiled code adds the result of an adapter to its linear's, and their gradients, in passes that come later, so a
recomputed layer holds both in bf16 once more."""
BIAS_BYTES = 2
"""A mask with a number for each pair of tokens is copied in bf16 while attention adds it to the scores."""
