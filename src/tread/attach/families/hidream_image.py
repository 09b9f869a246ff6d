"""HiDream-I1 and E1."""

from torch import nn

from tread.attach.family import Arguments, Family, Side, Stack, patches, setting

# image tokens first, then the padding of a grid that is not square, then text
_SIDES = (Side(name="hidden_states_masks", dim=1), Side(name="image_rotary_emb", dim=1))

_grid = patches("hidden_states", 2, 3, size=setting("config.patch_size"))


def _tokens(model: nn.Module, arguments: Arguments) -> int:
    """The input is latents (B, C, H, W), or a sequence of patches if the caller gives their mask."""
    return arguments["hidden_states"].shape[1] if arguments["hidden_states"].ndim == 3 else _grid(model, arguments)


HIDREAM_IMAGE = Family(
    models=("HiDreamImageTransformer2DModel",),
    stacks=(
        Stack(name="double_stream_blocks", returns=0, image="first", sides=_SIDES),
        Stack(name="single_stream_blocks", image="first", sides=_SIDES),
    ),
    tokens=_tokens,
    per_block=True,  # the model joins other text before each layer and cuts it off by the full length after it
)
