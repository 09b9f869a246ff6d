"""Adapters on a frozen transformer: LoRA, DoRA and LoKr through peft, other algorithms through lycoris.

- The base is frozen. The adapter is float32 whatever the dtype of the base, because bfloat16 rounds small steps away.
- A target is the end of a linear's name, as in peft: `to_q` matches every `to_q`, `attn.to_q` fewer. A target that
  matches no linear is an error: an adapter that silently trains half of what was asked for is worse than none.
- The initial weights are a function of the seed alone, not of the device or of earlier draws, and change no output.
- A base on the meta device (of a sharded run) gets an adapter with real values. DoRA's magnitudes start as the norms of
  the base's weights: these are read from the files one linear at a time.
- Lycoris keeps its parameters in a network beside the model. It becomes a submodule, so that optimizer, checkpoints
  and moving average include its parameters.
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tread.errors import ConfigError, nearest, needs
from tread.finetune.model.quantize import not_unpacked
from tread.finetune.model.weights import Weights
from tread.training.memory import give_back

AdapterKind = Literal["standard", "lokr", "lycoris"]
ADAPTER = "default"
"""The name of the adapter in peft."""
NETWORK = "lycoris_network"
"""The submodule that holds a lycoris adapter."""


def add_adapter(
    model: nn.Module,
    *,
    kind: AdapterKind,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    seed: int,
    dropout: float = 0.0,
    dora: bool = False,
    factor: int = -1,
    lycoris_config: Mapping[str, Any] | None = None,
    weights: Weights | None = None,
) -> None:
    """Freeze the model and put a new adapter on its linears.

    `dora` gives a LoRA magnitudes of its own (Liu et al. 2024, arXiv 2402.09353). `factor` is the size of LoKr's
    smaller Kronecker factor, -1 for nearly square ones. `dropout` acts on the input of a LoRA and on the rows of a
    LoKr's update. `lycoris_config` holds arguments of the lycoris library: `algo`, `linear_dim`, `linear_alpha` and
    others; its `apply_preset` chooses the linears by class, instead of `targets`. `weights` are the files of a base
    on the meta device, which DoRA reads its initial magnitudes from.
    """
    model.requires_grad_(False)
    preset = (lycoris_config or {}).get("apply_preset")
    linears = {} if preset else find_linears(model, targets)
    targets = _peft_targets(model, targets, linears)
    with torch.random.fork_rng(devices=[]), _stand_ins(model):
        torch.manual_seed(seed)
        if kind == "standard":
            _add_lora(model, targets, rank, alpha, dropout, dora)
        elif kind == "lokr":
            _add_lokr(model, linears, targets, rank, alpha, dropout, factor)
        else:
            _add_lycoris(model, linears, {"linear_dim": rank, "linear_alpha": alpha, **(lycoris_config or {})})
    if dora and weights is not None:
        _set_magnitudes(model, weights)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Replace parameters on the meta device by expanded CPU zeros, of one element each, inside this context.

    Peft moves a new adapter to the device of its linear: on the meta device it would lose its values.
    """
    empty = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    for module, name, parameter in empty:
        zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        module._parameters[name] = nn.Parameter(zeros, requires_grad=False)
    try:
        yield
    finally:
        for module, name, parameter in empty:
            module._parameters[name] = parameter


@torch.no_grad()
def _set_magnitudes(model: nn.Module, weights: Weights) -> None:
    """Recompute DoRA's magnitudes, which peft took from the zeros of `_stand_ins`, one linear at a time."""
    for path, module in model.named_modules():
        adapted: Any = module
        if ADAPTER not in getattr(adapted, "lora_magnitude_vector", ()):
            continue
        linear = adapted.get_base_layer()
        empty = dict(linear._parameters)
        weights.fill(linear, path)  # no-op for a linear that is not on the meta device
        adapted.lora_magnitude_vector[ADAPTER].update_layer(
            base_layer=linear,
            lora_A=adapted.lora_A[ADAPTER].weight,
            lora_B=adapted.lora_B[ADAPTER].weight,
            scaling=adapted.scaling[ADAPTER],
        )
        linear._parameters.update(empty)
        give_back()


def stored_name(name: str) -> str:
    """The name of a base's tensor without its adapter, as the released files have it.

    >>> stored_name("blocks.0.attn.to_q.base_layer.weight")
    'blocks.0.attn.to_q.weight'
    """
    return name.replace(".base_layer.", ".")


def find_linears(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """The linears that `targets` match, by full name."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    matched: dict[str, nn.Linear] = {}
    for target in targets:
        named = {name: linear for name, linear in linears.items() if name == target or name.endswith(f".{target}")}
        if not named:
            # the last two words of each name, without a leading layer number
            ends = sorted({re.sub(r"^\d+\.", "", ".".join(name.split(".")[-2:])) for name in linears})
            raise ConfigError(
                f"lora_targets names {target!r}, which is no linear of {type(model).__name__}"
                f"{nearest(target, [*ends, *linears])} It has: {', '.join(ends)}."
            )
        matched |= named
    return matched


def _peft_targets(model: nn.Module, targets: Sequence[str], linears: Mapping[str, nn.Linear]) -> Sequence[str]:
    """The targets, or full names if a target also names a ModuleList, which peft refuses (FLUX.2)."""
    ends = tuple(f".{target}" for target in targets)
    lists = (name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return list(linears) if any(name.endswith(ends) for name in lists) else targets


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors, under the names that its loader reads."""
    network = getattr(model, NETWORK, None)
    if network is not None:
        return {name: tensor.detach() for name, tensor in network.state_dict().items()}
    from peft import get_peft_model_state_dict

    return {name: tensor.detach() for name, tensor in get_peft_model_state_dict(model).items()}


def adapter_scale(model: nn.Module) -> float:
    """The factor of a peft adapter's update: alpha / rank."""
    config = getattr(model, "peft_config")[ADAPTER]  # noqa: B009  (not declared by nn.Module)
    return float(getattr(config, "lora_alpha", None) or config.alpha) / config.r


def adapter_metadata(model: nn.Module) -> dict[str, Any]:
    """Peft's config of the adapter in JSON types; empty for lycoris, whose file needs no config."""
    configs: Any = getattr(model, "peft_config", {})
    if ADAPTER not in configs:
        return {}
    values = configs[ADAPTER].to_dict() | {"inference_mode": True}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}


def _add_lora(model: nn.Module, targets: Sequence[str], rank: int, alpha: float, dropout: float, dora: bool) -> None:
    peft = _peft()
    # peft writes the value to the file, and some loaders need an integer
    whole = int(alpha) if float(alpha).is_integer() else alpha
    config = peft.LoraConfig(
        r=rank, lora_alpha=whole, lora_dropout=dropout, target_modules=list(targets), use_dora=dora
    )
    with nullcontext() if dora else not_unpacked():  # DoRA needs the norms of the real weights
        _inject(model, config, peft)


@not_unpacked()
def _add_lokr(
    model: nn.Module,
    linears: Mapping[str, nn.Linear],
    targets: Sequence[str],
    rank: int,
    alpha: float,
    dropout: float,
    factor: int,
) -> None:
    peft = _peft()
    from peft.tuners.lokr.layer import factorization

    if any(linear.weight.shape != (linear.out_features, linear.in_features) for linear in linears.values()):
        # peft 0.21 gives LoKr's update the shape of the stored weight, which bitsandbytes packs into bytes
        raise ConfigError(
            "lora_type is 'lokr' and base_model_precision is 'nf4', which peft cannot combine: set "
            "base_model_precision to 'int4', or lora_type to 'standard'."
        )
    sides = [side for linear in linears.values() for side in (linear.in_features, linear.out_features)]
    largest = max(factorization(side, factor)[1] for side in sides)
    if rank >= largest / 2:
        alpha = rank  # full matrices have no rank to scale by: scale 1, as in lycoris
    config = peft.LoKrConfig(
        r=rank, alpha=alpha, rank_dropout=dropout, target_modules=list(targets), decompose_factor=factor
    )
    _inject(model, config, peft)


def _inject(model: Any, config: Any, peft: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*get_apply_tensor_subclass.*")  # it concerns merging only
        if hasattr(model, "add_adapter"):
            model.add_adapter(config, ADAPTER)
        else:  # PixArt's class has no add_adapter
            peft.inject_adapter_in_model(config, model, ADAPTER)


def _add_lycoris(model: nn.Module, linears: Mapping[str, nn.Linear], config: dict[str, Any]) -> None:
    with needs("lora_type lycoris needs lycoris-lora", "lycoris"):
        from lycoris import create_lycoris
        from lycoris.config import PRESET
    by_name = {"target_name": [f"{re.escape(name)}$" for name in linears], "target_module": []}
    chosen = config.pop("apply_preset", None) or by_name
    every = {"enable_conv": False, "target_name": [], "target_module": [], "module_algo_map": {}, "name_algo_map": {}}
    # lycoris keeps the fields of the last preset for the whole process, so this preset sets every field
    PRESET["tread"] = {**every, "use_fnmatch": False, "exclude_name": [], **chosen}
    if any(type(linear) is not nn.Linear or type(linear.weight.data) is not Tensor for linear in linears.values()):
        config["bypass_mode"] = True  # otherwise lycoris adds its update to the weight, which is not a plain tensor
    multiplier = config.pop("multiplier", 1.0)
    network = create_lycoris(model, multiplier, warn_on_unmatched=False, preset="tread", **config)
    if not network.loras:
        raise ConfigError(f"lycoris_config chooses no linear of {type(model).__name__}: {chosen}. Change apply_preset.")
    network.apply_to()
    network.requires_grad_(True)
    device = next(model.parameters()).device
    setattr(model, NETWORK, network.to(device))


def _peft() -> Any:
    with needs("LoRA and LoKr need peft", "diffusers"):
        import peft
    return peft
