"""A trial: norms whose rows of up to 4096 elements are read once.

The compiler holds rows of up to 1024 elements and reads longer ones twice: the norms of DiT-XL/2, over 1152, run at a
quarter of the memory's speed. Holding them gave 1.7 % of its step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LONGEST = 4096


@contextmanager
def whole_rows(on: bool = True) -> Iterator[None]:
    """What is compiled within holds its rows; its code must not be cached as that of others."""
    if not on:
        yield
        return
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            rows = features.get_reduction_hint() == ReductionHint.INNER
            fits = rows and V.graph.sizevars.statically_known_leq(features.reduction_numel, LONGEST)
            return fits or InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    with V.set_choices_handler(Choices()):
        yield
