"""The model as built: its zero start, its shapes, and its refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny.dit import MODERN, small_dit
from tread.errors import ConfigError
from tread.models import DiT, model_size

DIGITS: dict[str, Any] = {"input_size": 8, "in_channels": 1, "num_classes": 10}


def _batch(model: DiT, size: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    dtype = model.positions.dtype
    x = torch.randn(size, model.in_channels, *model.input_size, generator=generator, dtype=dtype)
    return x, torch.rand(size, generator=generator) * 1000, torch.arange(size) % (model.num_classes + 1)


@pytest.mark.parametrize("name", ["tiny", "modern-tiny"])
def test_a_fresh_model_is_the_identity_on_the_stream_and_predicts_zero(name: str):
    model = DiT(**model_size(name), **DIGITS)
    streams: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: streams.append(args[0]))
    model.final.register_forward_pre_hook(lambda module, args: streams.append(args[0]))
    out = model(*_batch(model))
    assert torch.count_nonzero(out) == 0
    assert len(streams) == 13
    assert streams[0].std() > 0.1
    assert all(torch.equal(stream, streams[0]) for stream in streams)


def test_a_fresh_model_is_zero_where_adaln_zero_says_and_only_there():
    model = DiT(**model_size("modern-tiny"), **DIGITS)
    zero = {name for name, p in model.named_parameters() if torch.count_nonzero(p) == 0}
    gates = {f"blocks.{layer}.modulation.{kind}" for layer in range(12) for kind in ("weight", "bias")}
    final = {f"final.{part}.{kind}" for part in ("modulation", "linear") for kind in ("weight", "bias")}
    assert gates | final <= zero
    assert not [name for name in zero - gates - final if not name.endswith("bias")]


def test_a_fresh_model_learns():
    torch.manual_seed(0)
    model = DiT(**model_size("tiny"), **DIGITS)
    x, time, labels = _batch(model, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses: list[float] = []
    for _ in range(15):
        loss = (model(x, time, labels) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.count_nonzero(p) for name, p in model.named_parameters() if ".modulation." in name)


@pytest.mark.parametrize("options", [{}, MODERN])
def test_positions_time_and_labels_reach_the_output(options):
    model = small_dit(**options).eval()
    x, time, labels = _batch(model)
    out = model(x, time, labels)
    assert out.shape == (2, 3, 6, 10)
    assert out.dtype == torch.float64
    assert (model(x, time + 1, labels) - out).abs().amax((1, 2, 3)).min() > 1e-3
    assert (model(x, time, torch.full_like(labels, 5)) - out).abs().amax((1, 2, 3)).min() > 1e-3
    flat = model(torch.ones_like(x), time, labels)  # equal patches differ by their positions alone
    assert (flat[:, :, :2, :2] - flat[:, :, 2:4, :2]).abs().max() > 1e-3
    assert (flat[:, :, :2, :2] - flat[:, :, :2, 2:4]).abs().max() > 1e-3


def test_one_class_and_its_null_class():
    model = small_dit(num_classes=1)
    x, time, _ = _batch(model)
    given, null = model(x, time, torch.tensor([0, 0])), model(x, time, torch.tensor([0, 1]))
    assert torch.equal(given[0], null[0])
    assert not torch.allclose(given[1], null[1])


def test_out_channels_default_to_the_input_channels():
    assert small_dit().out_channels == 3
    model = small_dit(out_channels=7)
    assert model(*_batch(model)).shape == (2, 7, 6, 10)


def test_the_state_dict_holds_parameters_only():
    model = DiT(**model_size("modern-tiny"), **DIGITS)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert {name for name, _ in model.named_buffers()} == {"positions", "rope_table"}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("options", [{}, MODERN])
def test_tokens_between_layers_are_what_was_asked_for(options, routed: bool, checkpointing: bool):
    """Under autocast, float32 as ever or bf16; a window's way around its layers too."""
    model: DiT = small_dit(checkpointing=checkpointing, **options).float()
    if routed:
        model.route({"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 4}]})
    dtypes: list[torch.dtype] = []
    for layer in (*model.blocks, model.final):
        layer.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
    outs: list[Tensor] = []
    for stream, expected in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        model.stream = stream
        model.zero_grad()
        dtypes.clear()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(*_batch(model))
        assert dtypes == [expected] * 7
        out.float().square().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.blocks.parameters())
        outs.append(out.detach().float())
    if not routed:  # each routed forward selects anew
        assert 0 < (outs[1] - outs[0]).norm() / outs[0].norm() < 0.05


def test_training_mode_alone_changes_nothing():
    model = small_dit()  # no dropout, and labels are dropped by the trainer
    batch = _batch(model, 32)
    assert torch.equal(model.train()(*batch), model.eval()(*batch))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_size": (6, 9)}, "input_size 9 does not divide into patches of 2"),
        ({"input_size": (6, 8, 10)}, r"input_size is \(6, 8, 10\); it must be one number or a height and a width"),
        ({"input_size": 8.0}, "input_size is 8.0; it must be a whole number"),
        ({"input_size": 0}, "input_size is 0; it must be at least 1"),
        ({"patch": 0}, "patch is 0; it must be at least 1"),
        ({"width": 30}, "width 30 does not divide into 4 heads"),
        ({"width": 30, "heads": 3}, "width 30 is not a multiple of 4"),
        ({"width": 24, "heads": 4, "rope": True}, "rope needs a head size.*width 24 over 4 heads gives 6"),
        ({"heads": 0}, "heads is 0; it must be at least 1"),
        ({"depth": 0}, "depth is 0; it must be at least 1"),
        ({"in_channels": 0}, "in_channels is 0"),
        ({"out_channels": 0}, "out_channels is 0"),
        ({"num_classes": 0}, "num_classes is 0; it must be at least 1"),
        ({"num_classes": 2.5}, "num_classes is 2.5; it must be a whole number"),
        ({"norm": "batch"}, "norm is 'batch'.*layer, rms"),
        ({"mlp": "relu"}, "mlp is 'relu'.*gelu, swiglu"),
        ({"mlp_ratio": 0.0}, "mlp_ratio is 0.0; it must be positive"),
        ({"checkpointing": "selectiv"}, "checkpointing is 'selectiv'; it must be true, false, 'selective' or 'dense'."),
        ({"mlp_ratio": float("inf")}, "mlp_ratio is inf; it must be positive"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        small_dit(**changes)


def test_an_input_of_another_size_is_refused():
    model = small_dit()
    x, time, labels = _batch(model)
    with pytest.raises(ValueError, match=r"shape \(2, 3, 6, 8\).*needs \(batch, 3, 6, 10\)"):
        model(x[..., :8], time, labels)
