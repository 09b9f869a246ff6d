"""What the tests of attached models share beside the contract: FLUX, a config for it, and how it is run."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.transformers import transformer_flux
from torch import nn

import tread
from tests.attach.selected import route
from tests.tiny.case import Case
from tests.tiny.stock import CASES

BY_NAME = {case.name: case for case in CASES}
FLUX, KONTEXT = BY_NAME["flux"], BY_NAME["flux-kontext"]
ROUTES = {"routes": [route(1, -2)]}
Attach = Callable[..., tread.Attachment]


def rotary_function() -> Any:
    """What FLUX's layers look up to rotate."""
    return vars(transformer_flux)["apply_rotary_emb"]


def routed(case: Case, model: nn.Module, handle: tread.Attachment, step: int = 0) -> torch.Tensor:
    handle.set_step(step)
    return case.call(model, case.inputs(2)).detach()
