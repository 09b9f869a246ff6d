"""LoRA and LoKr on routed models: they learn, and load by stock means in a process that never imports tread."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from peft import LoKrConfig, LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from torch.nn import functional as F

import tread
from pages.families import adapter_loaders
from tests.attach.selected import MISSION, inner, mission_cases
from tests.programs import run
from tests.tiny.case import Case
from tests.tiny.stock import CASES

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 4


def lora(targets: list[str]) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=targets)


def lokr(targets: list[str]) -> LoKrConfig:
    return LoKrConfig(r=4, alpha=8, target_modules=targets)


KINDS: dict[str, Callable[[list[str]], Any]] = {"lora": lora, "lokr": lokr}
every_kind = pytest.mark.parametrize("kind", KINDS)


def linears(case: Case, model: nn.Module) -> list[str]:
    """Every linear of every layer."""
    stacks = tuple(f"{blocks.name}." for blocks in case.blocks)
    return [name for name, module in model.named_modules() if type(module) is nn.Linear and name.startswith(stacks)]


def with_adapter(case: Case, model: Any, kind: str) -> Any:
    """Through diffusers where the class knows adapters, else through peft."""
    torch.manual_seed(0)
    config = KINDS[kind](linears(case, model))
    model.requires_grad_(False)
    if not hasattr(model, "add_adapter"):
        return get_peft_model(model, config)
    model.add_adapter(config)
    return model


def dense_loss(case: Case, model: nn.Module, target: Tensor) -> float:
    with torch.no_grad():
        return F.mse_loss(case.call(model, case.inputs(case.batch)), target).item()


def learn(case: Case, model: nn.Module, handle: tread.Attachment, target: Tensor) -> None:
    """A few steps on one batch, one noise and one selection."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(STEPS):
        handle.set_step(0)
        F.mse_loss(case.call(model, case.inputs(case.batch)), target).backward()
        assert handle.selections[0].shape[1] < case.tokens
        optimizer.step()
        optimizer.zero_grad()


def trained(case: Case, kind: str, *, attach_first: bool) -> tuple[Any, float, float]:
    """A model with a trained adapter, detached; the dense losses before and after."""
    model = case.model()
    target = torch.randn(case.call(model, case.inputs(case.batch)).shape, generator=torch.Generator().manual_seed(2))
    routes = {"routes": inner(case.depth)}
    handle = tread.attach(model, routes) if attach_first else None
    model = with_adapter(case, model, kind)
    handle = handle or tread.attach(model, routes)
    before = dense_loss(case, model, target)
    learn(case, model, handle, target)
    after = dense_loss(case, model, target)
    handle.detach()
    return model, before, after


@mission_cases
@every_kind
@pytest.mark.parametrize("first", ["attach", "adapter"])
def test_an_adapter_learns(case: Case, kind: str, first: str):
    _, before, after = trained(case, kind, attach_first=first == "attach")
    assert after < before


def save(case: Case, kind: str, folder: Path, loader: str) -> dict[str, str]:
    """Train and save an adapter in the way its loader wants it; what the other process needs to know."""
    model, _, _ = trained(case, kind, attach_first=True)
    folder.mkdir()
    torch.save(case.call(model.eval(), case.inputs(case.batch)).detach(), folder / "expected.pt")
    pipeline, _, method = loader.partition(".")
    if method == "load_lora_weights":
        metadata = {k: list(v) if isinstance(v, set) else v for k, v in model.peft_config["default"].to_dict().items()}
        getattr(diffusers, pipeline).save_lora_weights(
            folder, transformer_lora_layers=get_peft_model_state_dict(model), transformer_lora_adapter_metadata=metadata
        )
    elif method == "load_lora_adapter":
        model.save_lora_adapter(folder)
    else:
        model.save_pretrained(folder)
    return {"case": case.name, "loader": loader, "folder": str(folder)}


def one_per_class(names: set[str]) -> list[Case]:
    found = {type(case.build()): case for case in reversed(CASES) if case.name in names}
    return list(found.values())


OTHERS = {case.name for case in CASES} - set(MISSION)


@pytest.mark.parametrize(
    "names", [pytest.param(set(MISSION), id="mission"), pytest.param(OTHERS, id="others", marks=pytest.mark.contract)]
)
def test_a_saved_adapter_loads_without_tread_as_the_docs_say(names: set[str], tmp_path: Path):
    loaders = adapter_loaders()
    entries = [
        save(case, kind, tmp_path / f"{case.name}-{kind}", loaders[type(case.build()).__name__][i])
        for case in one_per_class(names)
        for i, kind in enumerate(KINDS)
    ]
    (tmp_path / "manifest.json").write_text(json.dumps(entries))
    run("-m", "tests.attach.load_adapters", tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) == len(entries) > 0
    for result in results:
        assert result["off"] < 1e-5, result
        assert result["moved"] > 1e-4, result


def test_lycoris_learns_too():
    """A LoKr of lycoris, which wraps the linears' forwards instead of the modules."""
    lycoris = pytest.importorskip("lycoris")
    case = next(case for case in CASES if case.name == "flux")
    model = case.model().requires_grad_(False)
    target = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(2))
    lycoris.LycorisNetwork.apply_preset({"target_module": ["FluxTransformerBlock", "FluxSingleTransformerBlock"]})
    network = lycoris.create_lycoris(model, 1.0, linear_dim=4, linear_alpha=4, algo="lokr")
    network.apply_to()
    with tread.attach(model, {"routes": inner(case.depth)}) as handle:
        before = dense_loss(case, model, target)
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
        for _ in range(STEPS):
            handle.set_step(0)
            F.mse_loss(case.call(model, case.inputs(case.batch)), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert dense_loss(case, model, target) < before
