"""Model sizes by name: "S/2" ... "XL/8", "tiny", and each of them as "modern-...".

- A size is a dict of `DiT` keyword arguments that depend on no data: image size, channels and classes come
  from the data.
- The letters are the sizes of Peebles and Xie (arXiv 2212.09748, table 1), the number is the patch; "tiny" is for
  the 8 x 8 digits, one token per pixel.
- "modern-" changes the layers and nothing else: rotary positions, QK-norm, RMSNorm and SwiGLU.
"""

from typing import Any

from tread.errors import check_choice

#             depth width heads
_LETTERS = {
    "S":      (12,  384,  6),
    "B":      (12,  768, 12),
    "L":      (24, 1024, 16),
    "XL":     (28, 1152, 16),
}  # fmt: skip
_PATCHES = (2, 4, 8)
_MODERN = {"rope": True, "qk_norm": True, "norm": "rms", "mlp": "swiglu"}


def _table() -> dict[str, dict[str, Any]]:
    plain: dict[str, dict[str, Any]] = {
        f"{letter}/{patch}": {"patch": patch, "depth": depth, "width": width, "heads": heads}
        for letter, (depth, width, heads) in _LETTERS.items()
        for patch in _PATCHES
    }
    plain["tiny"] = {"patch": 1, "depth": 12, "width": 64, "heads": 4}
    return plain | {f"modern-{name}": arguments | _MODERN for name, arguments in plain.items()}


SIZES = tuple(_table())
"""The names that `model_size` takes."""


def model_size(name: str) -> dict[str, Any]:
    """The `DiT` keyword arguments of a named size, as a new dict.

    >>> model_size("B/2")
    {'patch': 2, 'depth': 12, 'width': 768, 'heads': 12}
    """
    return _table()[check_choice(name, "the model size", SIZES)]
