"""A call of the DiT inside a checkpointed function: its recomputation keeps the tokens that its forward kept."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.tiny.dit import small_dit

pytestmark = pytest.mark.filterwarnings("ignore")


def gradients(checkpointing: bool, reentrant: bool | None, selector: str) -> list[Tensor]:
    """Two forwards, the step moved on, one backward."""
    torch.manual_seed(0)
    model = small_dit(rope=True, checkpointing=checkpointing)
    config = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 3}], "selector": selector}
    handle = model.route(config)
    handle.set_step(2)
    outputs = []
    for i in range(2):
        x, time = torch.randn(2, 3, 6, 10, dtype=torch.float64).requires_grad_(), torch.tensor([100.0, 700.0])
        arguments = x, time, torch.tensor([i, 3])
        outputs.append(
            model(*arguments) if reentrant is None else checkpoint(model, *arguments, use_reentrant=reentrant)
        )
    handle.set_step(7)
    (outputs[0].square().sum() + 2 * outputs[1].square().sum()).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("selector", ["random", "l1"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_around_the_model(checkpointing: bool, selector: str):
    expected = gradients(False, None, selector)
    for reentrant in (True, False):
        found = gradients(checkpointing, reentrant, selector)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 if reentrant else 0.0)
