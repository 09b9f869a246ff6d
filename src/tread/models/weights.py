"""Read the published weights of facebookresearch/DiT into our DiT.

- The networks compute the same function; only keys and four layouts differ.
- Everything is checked before anything is written, so a mismatch leaves the model unchanged.
- The published models predict noise and a variance; a model with `out_channels == in_channels` takes the
  noise half alone.
- Their position embedding is a fixed table that ours computes for itself; it is compared and not stored.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tread.errors import ConfigError
from tread.models.dit import DiT

_OUTSIDE_BLOCKS = {
    "x_embedder.proj": "patch_embed",
    "t_embedder.mlp.0": "time_embed.fc1",
    "t_embedder.mlp.2": "time_embed.fc2",
    "final_layer.adaLN_modulation.1": "final.modulation",
    "final_layer.linear": "final.linear",
}
"""Published module -> our module."""
_IN_BLOCK = {name: name for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
"""The same within one block."""
_IN_BLOCK["adaLN_modulation.1"] = "modulation"


def _key_map(depth: int) -> dict[str, str]:
    """Published key -> our key, for every stored weight."""
    modules = dict(_OUTSIDE_BLOCKS)
    for layer in range(depth):
        modules |= {f"blocks.{layer}.{theirs}": f"blocks.{layer}.{ours}" for theirs, ours in _IN_BLOCK.items()}
    keys = {f"{theirs}.{name}": f"{ours}.{name}" for theirs, ours in modules.items() for name in ("weight", "bias")}
    return keys | {"y_embedder.embedding_table.weight": "label_embed.weight"}


def _check_layers(model: DiT) -> None:
    published = {"rope": False, "qk_norm": False, "norm": "layer", "mlp": "gelu"}
    for option, value in published.items():
        if (given := getattr(model, option)) != value:
            raise ConfigError(
                f"The published DiT weights need a model with {option}={value!r} and this one has {option}={given!r}; "
                "build it from a size without the prefix 'modern-'."
            )


def _check_keys(given: set[str], wanted: set[str]) -> None:
    if missing := sorted(wanted - given):
        raise ConfigError(
            f"The state dict has no key {missing[0]!r} ({len(missing)} of the {len(wanted)} that this model needs "
            "are missing); give the published DiT state dict itself, of the size that the model has."
        )
    if unknown := sorted(given - wanted):
        raise ConfigError(
            f"The state dict has the key {unknown[0]!r} ({len(unknown)} such), which this model does not have; "
            "build the model with the depth of the published one."
        )


@torch.no_grad()
def load_published_dit(model: DiT, state_dict: Mapping[str, Tensor]) -> None:
    """Load a published DiT state dict, e.g. DiT-XL-2-256x256.pt, into `model` in place.

    model = DiT(**model_size("XL/2"), input_size=32, in_channels=4, out_channels=8, num_classes=1000)
    load_published_dit(model, torch.load("DiT-XL-2-256x256.pt", weights_only=True))
    """
    _check_layers(model)
    keys = _key_map(model.depth)
    _check_keys(set(state_dict), {*keys, "pos_embed"})

    positions, channels = model.patch**2, model.in_channels
    wanted = {theirs: tuple(model.get_parameter(ours).shape) for theirs, ours in keys.items()}
    wanted["x_embedder.proj.weight"] = (model.width, channels, model.patch, model.patch)
    wanted["pos_embed"] = (1, *model.positions.shape)
    takes_noise_half = (
        model.out_channels == channels and state_dict["final_layer.linear.bias"].shape[0] == 2 * positions * channels
    )
    if takes_noise_half:
        wanted["final_layer.linear.weight"] = (2 * positions * channels, model.width)
        wanted["final_layer.linear.bias"] = (2 * positions * channels,)
    for theirs, shape in wanted.items():
        if (given := tuple(state_dict[theirs].shape)) != shape:
            raise ConfigError(
                f"The weight {theirs!r} has shape {given} where this model needs {shape}; build the model with the "
                "size, patch, channels and number of classes of the published one."
            )
    if not torch.allclose(state_dict["pos_embed"][0].to(model.positions), model.positions, atol=1e-4):
        raise ConfigError(
            "The table 'pos_embed' is not the fixed sine-cosine embedding that this model computes; "
            "give the weights of a published DiT."
        )

    mapped = {ours: state_dict[theirs] for theirs, ours in keys.items()}
    convolution = mapped["patch_embed.weight"]  # (D, C, p, p)
    mapped["patch_embed.weight"] = convolution.permute(0, 2, 3, 1).flatten(1)  # (D, p * p * C)
    if takes_noise_half:
        for name in ("final.linear.weight", "final.linear.bias"):
            each = mapped[name].unflatten(0, (positions, -1))  # (positions, published channels, ...)
            mapped[name] = each[:, :channels].flatten(0, 1)  # (positions * channels, ...)
    model.load_state_dict(mapped)
