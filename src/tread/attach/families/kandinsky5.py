"""Kandinsky 5: image and video, with full attention."""

from torch import nn

from tread.attach.family import Arguments, Family, Side, Stack


def _refuse(model: nn.Module, arguments: Arguments) -> str | None:
    if arguments.get("sparse_params") is None:
        return None
    return "sparse attention (sparse_params) groups tokens by their position in the grid. Train with full attention."


KANDINSKY5 = Family(
    models=("Kandinsky5Transformer3DModel",),
    stacks=(Stack(name="visual_transformer_blocks", stream="visual_embed", sides=(Side(name="rope", dim=1),)),),
    refuse=_refuse,
    notes="Layers are the visual ones. Sparse attention is refused.",
)
