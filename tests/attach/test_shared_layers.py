"""Two attached models that share layers: only the one attached last routes, and the other says so."""

import copy

import pytest
import torch

import tread
from tests.attach.attached import FLUX, ROUTES, Attach, routed
from tests.attach.selected import route

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_earlier_model_is_refused_where_it_would_route(attach: Attach, expected: torch.Tensor):
    """The layers of its window are the other's, those before it are its own: it would run dense."""
    first, second = FLUX.model(), FLUX.model()
    second.single_transformer_blocks = first.single_transformer_blocks
    routes = {"routes": [route(2, 3)]}
    handle, other = attach(first, routes), attach(second, ROUTES)
    assert routed(FLUX, second, other).equal(expected)
    handle.set_step(0)
    with pytest.raises(tread.ConfigError, match="a FluxSingleTransformerBlock of this model is a layer of another one"):
        FLUX.call(first, FLUX.inputs(2))
    dense = FLUX.call(FLUX.model(), FLUX.inputs(2))
    assert FLUX.call(first.eval(), FLUX.inputs(2)).equal(dense)
    first.train()
    other.detach()
    with pytest.raises(tread.ConfigError, match="attach this one again"):
        FLUX.call(first, FLUX.inputs(2))
    handle = attach(first, ROUTES)
    assert routed(FLUX, first, handle).equal(expected)


def test_a_shallow_copy_that_is_attached_too(attach: Attach, expected: torch.Tensor):
    """It shares every layer, so it takes the routing along as a second attach of the model does."""
    model = FLUX.model()
    handle, twin = attach(model, ROUTES), copy.copy(model)
    other = attach(twin, ROUTES)
    assert routed(FLUX, twin, other).equal(expected)
    with pytest.raises(tread.ConfigError, match=r"a later tread\.attach of the same model replaced this handle"):
        handle.set_step(0)
