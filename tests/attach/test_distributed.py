"""Two processes, DDP and FSDP2: the gradients of one process on the whole batch, the selections of its samples."""

import json
from pathlib import Path

import pytest
import torch

import tread
from tests.attach.attached import BY_NAME
from tests.attach.two_ranks import ROUTES, STEP, STEPS, main
from tests.forks import in_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both ranks wrote down."""
    folder = tmp_path_factory.mktemp("ranks")
    in_ranks(main, folder)
    return folder


@pytest.mark.parametrize(("name", "mode"), STEPS)
def test_two_processes_are_one(name: str, mode: str, folder: Path):
    case = BY_NAME[name]
    model = case.model()
    with tread.attach(model, ROUTES) as handle:
        handle.set_step(STEP)
        case.call(model, case.inputs(2)).square().mean().backward()
        selection = handle.selections[0].tolist()
    ranks = [json.loads((folder / f"{case.name}-{mode}-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] != ranks[1]
    assert ranks[0] + ranks[1] == selection
    got = torch.load(folder / f"{case.name}-{mode}.pt", weights_only=True)
    assert len(got) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert (got[name] is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            scale = parameter.grad.abs().max().clamp(min=1e-6)
            torch.testing.assert_close(got[name] / scale, parameter.grad / scale, rtol=1e-5, atol=1e-5)
