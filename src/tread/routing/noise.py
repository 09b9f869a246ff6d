"""Random numbers as a pure function of integer words: no generator, no global state.

- `bits(seed, step, sample, token)` hashes its words and nothing else, so a number depends on its words and never on
  earlier draws: a resumed run, another number of processes, CPU or GPU, eager or compiled code all see the same values.
- A word is a non-negative Python int or an int64 tensor below 2**32; tensors broadcast against each other. Leading
  Python ints are folded on the host and cost no kernel.
- Everything stays below 2**63: a 32-bit state times a constant below 2**31. No product overflows, so backends cannot
  differ in how they wrap.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Word = int | Tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x1E3779B9


def _mix(h: Word) -> Word:
    """A bijection of 32-bit integers in which every input bit affects every output bit."""
    h = h ^ (h >> 16)
    h = (h * 0x21F0AAAD) & _MASK
    h = h ^ (h >> 15)
    h = (h * 0x735A2D97) & _MASK
    h = h ^ (h >> 16)
    h = (h * 0x31848BAB) & _MASK
    return h ^ (h >> 15)


def _fold(words: tuple[Word, ...], h: Word = _GOLDEN) -> Word:
    for word in words:
        h = _mix(h ^ (word & _MASK))
        while isinstance(word, int) and (word := word >> 32) > 0:  # a seed may be longer than 32 bits
            h = _mix(h ^ (word & _MASK))
        h = (h + _GOLDEN) & _MASK  # between words, so that (0, 1) and (1, 0) differ
    return h


def bits(*words: Word) -> Tensor:
    """32 random bits per element, as int64 in [0, 2**32); the shape is the broadcast shape of the words.

    >>> bits(0, 7, torch.arange(2)[:, None], torch.arange(3)).shape
    torch.Size([2, 3])
    """
    return torch.as_tensor(_mix(_fold(words)))


def counter() -> Tensor:
    """A word that changes in place, 0-d on the CPU, so that compiled code reads it; a plain tensor wherever it is made,
    inside `torch.inference_mode` and `torch.device("meta")` too."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=torch.int64, device="cpu")


def uniform(*words: Word) -> Tensor:
    """Float32 in the open interval (0, 1), in steps of 2**-23."""
    return _to_unit(bits(*words))


def _to_unit(bits: Tensor) -> Tensor:
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def two_uniforms(*words: Word) -> tuple[Tensor, Tensor]:
    """`uniform(*words, 0)` and `uniform(*words, 1)`, from one fold of the words they share."""
    shared = _fold(words)
    first, second = (_to_unit(torch.as_tensor(_mix(_fold((last,), shared)))) for last in (0, 1))
    return first, second


draw_two: Callable[..., tuple[Tensor, Tensor]] = two_uniforms
"""The integer part of `normal`, about a hundred kernels. Trainers on a GPU replace it by a compiled version with the
same bits. The rest of `normal` is never compiled: its logarithm and cosine would differ in the last bit."""


def normal(*words: Word) -> Tensor:
    """Standard normal float32, by the Box-Muller transform of two independent uniforms."""
    first, second = draw_two(*words)
    return torch.sqrt(-2.0 * torch.log(first)) * torch.cos(2.0 * math.pi * second)


def permutation(count: int, *words: int) -> Tensor:
    """A permutation of 0..count - 1, (count,) int64: the stable sort of hashed indices."""
    return torch.argsort(bits(*words, torch.arange(count)), stable=True)


def per_sample_normal(seed: Word, index: Tensor, shape: tuple[int, ...], *words: int) -> Tensor:
    """Standard normal noise of the samples `index` (B,) -> (B, *shape), on the device of `index`.

    `seed` is one for all or one for each, (B,). `words`, such as a purpose or a solver's step, separate several draws
    for one sample.
    """
    element = torch.arange(math.prod(shape), device=index.device)  # (E,)
    seed = seed[:, None] if isinstance(seed, Tensor) else seed  # (B, 1)
    return normal(seed, index[:, None], *words, element).unflatten(1, shape)  # (B, E) -> (B, *shape)
