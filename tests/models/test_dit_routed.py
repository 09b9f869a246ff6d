"""Routing in the layer loop: exact against a loop written by hand, and without a trace when taken off."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny.dit import MODERN, small_dit
from tread.errors import ConfigError
from tread.kernels import checkpointing
from tread.models import DiT
from tread.models.layers import patchify, unpatchify
from tread.routing.state import State

# Two windows that touch: tokens return after layer 3 and others leave before layer 4.
ROUTES: dict[str, Any] = {
    "routes": [
        {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 3},
        {"selection_ratio": 0.4, "start_layer_idx": 4, "end_layer_idx": 4},
    ]
}
WINDOWS = [(2, 3), (4, 4)]

plain_and_modern = pytest.mark.parametrize("options", [{}, MODERN], ids=["plain", "modern"])


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 3, 6, 10, generator=generator, dtype=torch.float64)
    return x, torch.tensor([1.0, 300.0, 990.0]), torch.tensor([0, 3, 5])


def _by_hand(model: DiT, selections: list[Tensor], x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
    """The forward of one sample after the other, rows taken out and put back by plain indexing."""
    outputs = []
    for sample in range(len(x)):
        one = slice(sample, sample + 1)
        stream = model.patch_embed(patchify(x[one], model.patch)) + model.positions  # (1, S, D)
        c = torch.nn.functional.silu(model.time_embed(time[one]) + model.label_embed(labels[one]))
        rows = torch.arange(stream.shape[1])
        full = stream
        for layer, block in enumerate(model.blocks):
            for (start, _), selection in zip(WINDOWS, selections, strict=True):
                if layer == start:
                    full, rows = stream, selection[sample]
                    stream = stream[:, rows]  # (1, K, D)
            stream = block(stream, c, None if model.rope_table is None else model.rope_table[rows])
            for _, end in WINDOWS:
                if layer == end:
                    restored = full.clone()
                    restored[:, rows] = stream
                    stream, rows = restored, torch.arange(full.shape[1])  # (1, S, D)
        outputs.append(unpatchify(model.final(stream, c), model.patch, model.grid))
    return torch.cat(outputs)


def _loss_and_gradients(model: DiT, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = model(*batch).square().mean()
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return loss.detach(), [gradient.clone() for gradient in gradients if gradient is not None]


@plain_and_modern
def test_routed_equals_the_same_blocks_by_hand(batch, options):
    model = small_dit(**options)
    dense = model(*batch)
    handle = model.route(ROUTES)
    routed = model(*batch)
    assert [tuple(selection.shape) for selection in handle.selections] == [(3, 8), (3, 9)]
    torch.testing.assert_close(routed, _by_hand(model, handle.selections, *batch), atol=1e-12, rtol=1e-12)
    assert (routed - dense).abs().amax((1, 2, 3)).min() > 1e-2


@plain_and_modern
@pytest.mark.parametrize("way", ["ratio 0", "all forced"])
def test_keeping_every_token_equals_dense(batch, options, way):
    model = small_dit(**options)
    dense, dense_gradients = _loss_and_gradients(model, batch)
    if way == "ratio 0":
        handle = model.route({"routes": [route | {"selection_ratio": 0.0} for route in ROUTES["routes"]]})
        loss, gradients = _loss_and_gradients(model, batch)
    else:
        handle = model.route(ROUTES)
        with pytest.warns(UserWarning, match="gains little"), handle.force_keep(torch.ones(3, 15, dtype=torch.bool)):
            loss, gradients = _loss_and_gradients(model, batch)
    assert [selection.shape[1] for selection in handle.selections] == [15, 15], "the machinery did not run"
    torch.testing.assert_close(loss, dense, atol=0, rtol=1e-13)
    torch.testing.assert_close(gradients, dense_gradients, atol=1e-13, rtol=1e-10)


@plain_and_modern
def test_gradients_reach_every_token(batch, options):
    model = small_dit(**options)
    x = batch[0].requires_grad_()
    streams: list[Tensor] = []
    model.blocks[1].register_forward_hook(lambda module, args, out: (out.retain_grad(), streams.append(out))[0])
    handle = model.route(ROUTES)
    model(*batch).square().mean().backward()
    entering = streams[0].grad
    assert entering is not None
    assert x.grad is not None
    assert entering.abs().amax(-1).min() > 1e-8
    assert x.grad.abs().min() > 0
    dropped = torch.ones(3, 15, dtype=torch.bool).scatter_(1, handle.selections[0], False)
    assert dropped.any(dim=1).all()
    assert entering[dropped].abs().amax(-1).min() > 1e-8


@plain_and_modern
def test_a_batch_equals_its_samples_one_by_one(batch, options):
    model = small_dit(**options)
    handle = model.route(ROUTES)
    together = model(*batch)
    selections = list(handle.selections)
    for sample in range(3):
        one = slice(sample, sample + 1)
        with handle.routed(selections=[selection[one] for selection in selections]):
            alone = model(*(part[one] for part in batch))
        torch.testing.assert_close(alone, together[one], atol=1e-12, rtol=1e-12)


@plain_and_modern
@pytest.mark.parametrize("how", [True, "selective"])
def test_checkpointed_equals_not_bit_for_bit(batch, options, how, monkeypatch):
    monkeypatch.setattr(checkpointing, "LEAST", 1)  # the products of so small a model are dear too
    plain, checkpointed = small_dit(**options), small_dit(**options, checkpointing=how)
    runs: list[int] = []
    for layer, block in enumerate(checkpointed.blocks):
        block.register_forward_pre_hook(lambda *_, layer=layer: runs.append(layer))
    handles = [model.route(ROUTES) for model in (plain, checkpointed)]
    for _ in range(2):
        runs.clear()
        (loss, gradients), (again, gradients_again) = (_loss_and_gradients(m, batch) for m in (plain, checkpointed))
        assert torch.equal(loss, again)
        assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))
        assert sorted(runs) == sorted([*range(6)] * 2), "the blocks were not recomputed in backward"
    assert handles[0].state_dict() == handles[1].state_dict()


def test_dense_checkpointing_recomputes_what_drops_less(batch):
    """The blocks of a cool-down step, and not those of a routed one."""
    model = small_dit(**MODERN, checkpointing="dense")
    handle = model.route({**ROUTES, "schedule": {"cooldown_fraction": 0.5, "total_steps": 4}})
    runs: list[int] = []
    for layer, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, layer=layer: runs.append(layer))
    plain = small_dit(**MODERN)
    for step, times in ((0, 1), (3, 2)):
        runs.clear()
        handle.set_step(step)
        plain.routing = None if step == 3 else plain.route(ROUTES)
        (loss, gradients), (expected, gradients_expected) = (_loss_and_gradients(m, batch) for m in (model, plain))
        assert sorted(runs) == sorted([*range(6)] * times)
        assert torch.equal(loss, expected)
        assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_expected, strict=True))


def test_two_forwards_before_one_backward(batch):
    model = small_dit(**MODERN)
    handle = model.route(ROUTES)
    apart = []
    for step in (0, 1):
        handle.set_step(step)
        apart.append(_loss_and_gradients(model, batch)[1])
    model.zero_grad()
    losses = []
    for step in (0, 1):
        handle.set_step(step)
        losses.append(model(*batch).square().mean())
    sum(losses, torch.zeros(())).backward()
    for parameter, first, second in zip(model.parameters(), *apart, strict=True):
        torch.testing.assert_close(parameter.grad, first + second, atol=1e-12, rtol=1e-9)
    assert not torch.equal(losses[0], losses[1])


def test_routing_is_on_only_in_training_with_gradients(batch):
    model = small_dit()
    dense = model(*batch)
    handle = model.route(ROUTES)
    assert not torch.allclose(model(*batch), dense)
    with torch.no_grad():
        assert torch.equal(model(*batch), dense)
    assert torch.equal(model.eval()(*batch), dense)
    with torch.no_grad(), handle.routed():
        assert not torch.allclose(model(*batch), dense)


def test_routing_leaves_no_trace(batch):
    model = small_dit(**MODERN)
    dense = model(*batch)
    keys, modules = list(model.state_dict()), [name for name, _ in model.named_modules()]
    handle = model.route(ROUTES, seed=7)
    model(*batch)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == modules
    before = handle.state_dict()
    copied = copy.deepcopy(model)  # as an EMA does
    assert torch.equal(copied.eval()(*batch), dense)
    assert not torch.equal(copied.train()(*batch), dense)
    assert handle.state_dict() == before, "the copy has a handle of its own"
    model.routing = None
    assert model.routing is None
    assert torch.equal(model(*batch), dense)


def test_the_seed_decides_the_selections(batch):
    model = small_dit()
    seen = {}
    for seed in (None, 0, 1, 0):
        handle = model.route(ROUTES | {"seed": 1}, seed=seed)
        model(*batch)
        drawn = torch.cat([selection.flatten() for selection in handle.selections])
        assert torch.equal(seen.setdefault(seed, drawn), drawn)
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[None], seen[1])


def test_routes_are_checked_against_the_depth():
    with pytest.raises(ConfigError, match="6 layers"):
        small_dit().route({"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 6}]})


@plain_and_modern
def test_bf16_autocast_runs_and_is_close(batch, options):
    model = small_dit(**options).float()
    batch = (batch[0].float(), *batch[1:])
    handle = model.route(ROUTES)
    full = model(*batch)
    handle.set_step(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(*batch)
    assert half.dtype == torch.bfloat16
    assert ((half - full).norm() / full.norm()).item() < 0.05
    half.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    "options", [pytest.param({}, id="plain", marks=pytest.mark.contract), pytest.param(MODERN, id="modern")]
)
def test_compiled_whole_equals_eager_and_does_not_recompile_with_the_step(batch, options):
    torch.compiler.reset()
    model = small_dit(**options)
    handle = model.route(ROUTES)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    drawn = []
    for step in range(4):
        handle.set_step(step)
        loss, gradients = _loss_and_gradients(model, batch)
        handle.set_step(step)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            model.zero_grad()
            again = compiled(*batch).square().mean()
            again.backward()
        torch.testing.assert_close(again, loss, atol=0, rtol=1e-12)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-12, rtol=1e-9)
        drawn.append(torch.cat([selection.flatten() for selection in handle.selections]).clone())
    assert not torch.equal(drawn[1], drawn[2])


@plain_and_modern
def test_permuted_tokens_give_the_dense_output(
    options: dict[str, Any], batch: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample in an order of its own, and back; a rope table that stayed behind would be noticed."""
    model = small_dit(**options).eval()
    dense = model(*batch)
    handle = model.route(ROUTES)
    with handle.permuted():
        torch.testing.assert_close(model(*batch), dense)
        for selection in handle.selections:
            assert torch.equal(selection.sort().values, torch.arange(15).expand(3, -1))
            assert not torch.equal(selection[0], selection[1])
        if model.rope:
            monkeypatch.setattr(State, "side", lambda self, name, tensor, **_: tensor)
            assert not torch.allclose(model(*batch), dense)
    assert torch.equal(model(*batch), dense)
