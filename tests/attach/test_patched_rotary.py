"""Rotary functions other than the stock ones: of attention processors of one's own, and of libraries that patch."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers import transformer_flux
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attach.attached import FLUX, ROUTES, Attach, rotary_function, routed

pytestmark = pytest.mark.filterwarnings("ignore")


class Processor:
    """FLUX's attention as diffusers 0.34 computed it, and processors derived from that still do: the heads come before
    the tokens. `rotate` is called with a tensor and the table."""

    def __init__(self, rotate: Callable[[Tensor, Any], Any]) -> None:
        self.rotate = rotate

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        def heads(x: Tensor, *layers: nn.Module) -> list[Tensor]:
            return [layer(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for layer in layers]

        q, k, v = heads(hidden_states, attn.to_q, attn.to_k, attn.to_v)
        q, k = attn.norm_q(q), attn.norm_k(k)
        if encoder_hidden_states is not None:
            text = heads(encoder_hidden_states, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            text[:2] = attn.norm_added_q(text[0]), attn.norm_added_k(text[1])
            q, k, v = (torch.cat(both, dim=2) for both in zip(text, (q, k, v), strict=True))
        q, k = self.rotate(q, image_rotary_emb), self.rotate(k, image_rotary_emb)
        x = F.scaled_dot_product_attention(q, k, v)
        x = x.transpose(1, 2).reshape(hidden_states.shape[0], -1, hidden_states.shape[-1])
        if encoder_hidden_states is None:
            return x
        text, image = x.tensor_split([encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[0](image), attn.to_add_out(text)


def gradients(processor: Processor | None, batch: int, attach: Attach) -> list[Tensor]:
    """The output of a routed forward, and every gradient."""
    model = FLUX.model()
    if processor is not None:
        model.set_attn_processor(processor)
    handle = attach(model, ROUTES)
    handle.set_step(0)
    output = FLUX.call(model, FLUX.inputs(batch))
    assert handle.selections[0].shape == (batch, 8)
    return [output, *torch.autograd.grad(output.square().sum(), list(model.parameters()))]


def test_a_processor_that_imports_the_rotary_function_from_elsewhere(attach: Attach):
    """It knows of no table per sample, which it broadcast wrongly without an error; one sample needs none."""
    found = gradients(Processor(apply_rotary_emb), 1, attach)
    torch.testing.assert_close(found, gradients(None, 1, attach), rtol=1e-5, atol=1e-5)


CALLS: dict[str, Callable[[Tensor, Any], Any]] = {
    "the function's own axis": lambda x, table: rotary_function()(x, table),
    "positional": lambda x, table: rotary_function()(x, table, True, -1, 2),
    "keywords": lambda x, table: rotary_function()(x=x, sequence_dim=2, freqs_cis=table),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_processor_that_calls_the_models_rotary_function_in_its_own_way(call: str, attach: Attach):
    found = gradients(Processor(CALLS[call]), 2, attach)
    torch.testing.assert_close(found, gradients(None, 2, attach), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize("wraps", [False, True])
def test_a_rotary_function_that_is_replaced_after_attaching(
    wraps: bool, attach: Attach, expected: Tensor, monkeypatch: pytest.MonkeyPatch
):
    """A library of kernels brings a function of its own, which may have copied the attributes of what it replaces."""
    gc.collect()  # models that earlier tests left attached
    calls = []

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return apply_rotary_emb(*args, **kwargs)

    model = FLUX.model()
    handle = attach(model, ROUTES)
    if wraps:
        mine = functools.wraps(rotary_function())(mine)
    monkeypatch.setattr(transformer_flux, "apply_rotary_emb", mine)
    assert routed(FLUX, model, handle).equal(expected)
    assert calls
    handle.detach()
    assert rotary_function() is mine
