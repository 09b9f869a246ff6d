"""Steps of a tiny model with offloaded layers, and their comparison with those of the model as it is."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tread
from tests.attach.attached import FLUX, ROUTES, Attach
from tests.attach.steps import inputs_of, step
from tests.tiny.case import Case
from tread.attach.registry import layers_of
from tread.kernels.offload.call import is_offloaded

DEPTH = len(layers_of(FLUX.model()))
STEPS = 3


def train(case: Case, model: nn.Module, handle: tread.Attachment) -> list[Any]:
    """Predictions and gradients of a few steps, with draws from torch's own generator."""
    torch.manual_seed(5)
    inputs = inputs_of(case, "cpu")
    return [step(case, model, handle, inputs, number) for number in range(STEPS)]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    """Bit for bit, with a gradient for every parameter that had one."""
    for (prediction, gradients), (other, others) in zip(found, expected, strict=True):
        assert torch.equal(prediction, other)
        assert gradients.keys() == others.keys()
        assert gradients
        for name, gradient in gradients.items():
            assert torch.equal(gradient, others[name]), name


def compared(case: Case, make: Callable[[], Any], attach: Attach, layers: int | None = None) -> tread.Attachment:
    """Train a model as it is and with layers offloaded; returns the handle of the second."""
    plain = make()
    expected = train(case, plain, attach(plain, ROUTES))
    model = make()
    handle = attach(model, ROUTES)
    count = len(layers_of(model)) if layers is None else layers
    assert handle.offload(count, say=lambda _: None) is handle
    assert sum(is_offloaded(layer) for layer in layers_of(model)) == count
    assert_equal(train(case, model, handle), expected)
    return handle


def count_runs(model: nn.Module) -> list[nn.Module]:
    """The layers that run from now on, in order."""
    runs: list[nn.Module] = []
    for layer in layers_of(model):
        layer.register_forward_hook(lambda layer, args, output: runs.append(layer))
    return runs
