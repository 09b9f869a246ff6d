"""DiT: a class-conditional diffusion transformer (Peebles and Xie, arXiv 2212.09748; SiT shares it).

- Routing is in the layer loop of `DiT.forward` only. `route` sets a `Handle` as a plain attribute: parameters,
  buffers and state-dict keys do not change.
- Labels are dropped by the trainer, not here; the null class is the index `num_classes`.
- `time` is embedded as given: callers scale their noise level to about 0..1000.
- The position table and the rope table are functions of the grid and therefore not in the state dict. The
  position table is added with rope too: rope encodes relative positions only, and an image has borders.
- `checkpointing` covers the blocks; selecting and restoring tokens is outside it.
- One function initialises all weights and zeroes adaLN and the output last: a fresh model is the identity on the
  stream and predicts exactly 0.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from tread.errors import ConfigError, check_choice, check_int
from tread.kernels.checkpointing import Checkpointing, recomputed_now, recomputing
from tread.models import layers
from tread.routing.handle import Handle
from tread.routing.plan import RoutePlan
from tread.routing.state import State


class DiT(nn.Module):
    """Predicts an image from a noisy one, its time and its class.

    >>> model = DiT(input_size=8, patch=1, in_channels=1, depth=12, width=64, heads=4, num_classes=10)
    >>> handle = model.route({"preset": "paper"})
    >>> model(torch.randn(2, 1, 8, 8), torch.tensor([10.0, 900.0]), torch.tensor([3, 10])).shape
    torch.Size([2, 1, 8, 8])
    """

    positions: Tensor
    rope_table: Tensor | None

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        patch: int,
        in_channels: int,
        depth: int,
        width: int,
        heads: int,
        num_classes: int,
        mlp_ratio: float = 4.0,
        out_channels: int | None = None,
        rope: bool = False,
        qk_norm: bool = False,
        norm: layers.NormName = "layer",
        mlp: layers.MlpName = "gelu",
        checkpointing: Checkpointing = False,
    ) -> None:
        super().__init__()
        self.input_size = _input_size(input_size, patch)
        self.patch = patch
        self.in_channels = check_int(in_channels, "in_channels", 1)
        self.out_channels = check_int(in_channels if out_channels is None else out_channels, "out_channels", 1)
        self.depth = check_int(depth, "depth", 1)
        self.width = _width(width, heads, rope)
        self.num_classes = check_int(num_classes, "num_classes", 1)
        self.rope, self.qk_norm = rope, qk_norm
        self.norm = check_choice(norm, "norm", get_args(layers.NormName))
        self.mlp = check_choice(mlp, "mlp", get_args(layers.MlpName))
        if not 1 <= width * mlp_ratio < math.inf:
            raise ConfigError(f"mlp_ratio is {mlp_ratio}; it must be positive, 4 is usual.")
        if checkpointing not in (False, True, "selective", "dense"):
            raise ConfigError(f"checkpointing is {checkpointing!r}; it must be true, false, 'selective' or 'dense'.")
        self.checkpointing: Checkpointing = checkpointing
        self.stream: torch.dtype | None = None
        """dtype of the residual stream; None keeps the embedding's."""
        self.routing: Handle | None = None
        """The handle that `route` made; None: every forward is dense."""

        self.grid = (self.input_size[0] // patch, self.input_size[1] // patch)
        table = layers.rope_positions(self.grid, width // heads) if rope else None
        self.register_buffer("positions", layers.sincos_positions(self.grid, width), persistent=False)  # (S, D)
        self.register_buffer("rope_table", table, persistent=False)  # (S, head_size / 2, 2)
        self.patch_embed = nn.Linear(patch * patch * in_channels, width)
        self.time_embed = layers.TimeEmbedding(width)
        self.label_embed = nn.Embedding(num_classes + 1, width)
        self.blocks = nn.ModuleList(
            layers.Block(width, heads, mlp_ratio=mlp_ratio, qk_norm=qk_norm, norm=norm, mlp=mlp) for _ in range(depth)
        )
        self.final = layers.FinalLayer(width, patch * patch * self.out_channels, norm=norm)
        self._init_weights()

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for embed in (self.time_embed.fc1, self.time_embed.fc2, self.label_embed):
            nn.init.normal_(embed.weight, std=0.02)
        for name, parameter in self.named_parameters():
            if ".modulation." in name or name.startswith("final."):
                nn.init.zeros_(parameter)

    def route(self, config: RoutePlan | Mapping[str, Any] | str | Path, *, seed: int | None = None) -> Handle:
        """Route tokens in training from now on by a `tread_config` or a plan; replaces earlier routing."""
        self.routing = Handle(RoutePlan.from_config(config), depth=self.depth, seed=seed)
        return self.routing

    def forward(self, x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        """Images x (B, C, H, W), time (B,), labels (B,) in 0..num_classes -> (B, out_channels, H, W)."""
        if x.shape[1:] != (self.in_channels, *self.input_size):
            raise ValueError(
                f"The input has shape {tuple(x.shape)} where this model needs (batch, {self.in_channels}, "
                f"{self.input_size[0]}, {self.input_size[1]}); set input_size and in_channels to the data's."
            )
        x = self.patch_embed(layers.patchify(x, self.patch)) + self.positions  # (B, S, D)
        x = x if self.stream is None else x.to(self.stream)
        c = nn.functional.silu(self.time_embed(time) + self.label_embed(labels))  # (B, D)
        state = self.routing.begin(training=self.training) if self.routing is not None else State()
        for layer, block in enumerate(self.blocks):
            x = state.enter(layer, x)  # (B, K, D) inside a window
            x = self._run(block, x, c, state.side("rope", self.rope_table))
            x = state.exit(layer, x)  # (B, S, D) again after a window
        return layers.unpatchify(self.final(x, c), self.patch, self.grid)  # (B, out_channels, H, W)

    def _run(self, block: nn.Module, x: Tensor, c: Tensor, rope: Tensor | None) -> Tensor:
        how = recomputed_now(self.checkpointing, [] if self.routing is None else [self.routing])
        if not (how and torch.is_grad_enabled()):
            return block(x, c, rope)
        # No layer draws random numbers, so there is no generator state to save.
        return recomputing(how)(block, x, c, rope, preserve_rng_state=False)


def _input_size(input_size: int | tuple[int, int], patch: int) -> tuple[int, int]:
    check_int(patch, "patch", 1)
    sizes = tuple(input_size) if isinstance(input_size, Sequence) else (input_size, input_size)
    if len(sizes) != 2:
        raise ConfigError(f"input_size is {input_size!r}; it must be one number or a height and a width.")
    for size in sizes:
        check_int(size, "input_size", 1)
        if size % patch:
            raise ConfigError(
                f"input_size {size} does not divide into patches of {patch}; change the patch, or the size of the data."
            )
    return sizes


def _width(width: int, heads: int, rope: bool) -> int:
    check_int(width, "width", 1)
    check_int(heads, "heads", 1)
    if width % heads:
        raise ConfigError(f"width {width} does not divide into {heads} heads; change width or heads.")
    if width % 4:
        raise ConfigError(
            f"width {width} is not a multiple of 4, which the position embedding needs (a sine and a cosine for "
            "each of two axes); change width."
        )
    if rope and width // heads % 4:
        raise ConfigError(
            f"rope needs a head size that is a multiple of 4, and width {width} over {heads} heads gives "
            f"{width // heads}; change width or heads, or set rope to false."
        )
    return width
