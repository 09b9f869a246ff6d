"""MiniMax-H3: video and audio in one packed stream. A forward is one sample."""

from typing import Any

from torch import Tensor

from tread.attach.family import Arguments, Family, Side, Stack, length


def _indices(model: Any, arguments: Arguments) -> Tensor:
    """Text, audio and the conditions' rows lie before and between the video rows."""
    return arguments["video_indices"].unsqueeze(0)


def _references(model: Any, arguments: Arguments) -> Tensor:
    """The conditions' rows come first among the video rows and have a timestep of their own."""
    steps = arguments["timestep_indices"].index_select(0, arguments["video_indices"])  # (S,)
    return (steps != steps[-1]).sum()


def _refuse(model: Any, arguments: Arguments) -> str | None:
    if arguments["hidden_states"].shape[0] == 1:
        return None
    return "its layers read every row's modulation by one list for the whole batch. Give it one sample at a time."


MINIMAX_H3 = Family(
    models=("MiniMaxH3Transformer3DModel",),
    stacks=(
        Stack(
            name="transformer_blocks",
            sides=(Side(name="adaln_indices", dim=0), Side(name="rotary_emb", dim=0)),
        ),
    ),
    tokens=length("hidden_states"),
    offset=_indices,
    references=_references,
    references_at="first",
    refuse=_refuse,
    notes="Video rows are routed; text and audio rows are not. One sample per forward. Conditions are kept unless "
    "reference_tokens is 'route'.",
)
