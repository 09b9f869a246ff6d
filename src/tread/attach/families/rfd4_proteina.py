"""RFD4 Proteina: protein structures, a token for each residue."""

from typing import Any

from tread.attach.family import Arguments, Family, Side, Stack, square


def _refuse(model: Any, arguments: Arguments) -> str | None:
    if arguments.get("recycle_depth", 0) <= 1:
        return None
    return "with a recycle_depth over 1 the layers run more than once in a forward. Train with recycle_depth 0 or 1."


RFD4_PROTEINA = Family(
    models=("RFD4ProteinaTransformer",),
    stacks=(
        Stack(
            name="transformer_layers",
            stream="values",
            sides=(*square("pairs", 1, 2), Side(name="condition", dim=1), Side(name="mask", dim=1)),
        ),
    ),
    # between layers the pairs are updated from all tokens
    per_block=True,
    refuse=_refuse,
    notes="Refused where layers are run more than once (recycle_depth over 1).",
)
