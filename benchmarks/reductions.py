"""A trial: reductions over up to 4096 elements that keep their row in registers.

The compiler does so up to 1024 elements and reads longer rows twice: a layer norm over the 1152 of DiT-XL/2 runs at a
quarter of the memory's speed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SHORTEST, LONGEST = 600, 4096


@contextmanager
def whole_rows(on: bool = True) -> Iterator[None]:
    """What is compiled within has them; its code must not be cached as that of others."""
    if not on:
        yield
        return
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            hint, size = features.get_reduction_hint(), features.reduction_numel
            known = V.graph.sizevars
            rows = hint == ReductionHint.INNER or (
                hint == ReductionHint.DEFAULT and known.statically_known_leq(SHORTEST, size)  # pyright: ignore[reportArgumentType]
            )
            import os

            if os.environ.get("TREAD_SHOW"):
                print(
                    "reduction",
                    hint,
                    size,
                    cooperative_reduction,
                    [n.get_name() for n in features.node_schedule if hasattr(n, "get_name")][:3],
                    flush=True,
                )
            fits = rows and known.statically_known_leq(size, LONGEST)
            return fits or InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    with V.set_choices_handler(Choices()):
        yield
