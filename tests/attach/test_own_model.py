"""A model of one's own, declared as the page and the examples do; the page and the examples themselves."""

import dataclasses
import re
import runpy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tread
from tests.attach.selected import route
from tests.programs import ROOT
from tread.errors import RiskWarning
from tread.finetune.starter import RATIO
from tread.routing.plan import PRESETS

pytestmark = pytest.mark.filterwarnings("ignore")


PAGE = ROOT / "docs" / "own-model.md"
OWN = runpy.run_path(str(ROOT / "examples" / "own_model.py"))


@pytest.mark.parametrize("selector", ["random", "l1"])
def test_a_model_of_ones_own(selector: str):
    """The example's declaration: all forced equals dense, a batch equals its samples, detach leaves no trace."""
    torch.manual_seed(0)
    model = OWN["PixelTransformer"]().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    images, time = torch.randn(2, *OWN["SHAPE"]), torch.rand(2)
    dense = model(images, time)
    config = {"routes": [route(1, -2)], "selector": selector}
    with tread.attach(model, config, family=OWN["FAMILY"]) as handle:
        output = model(images, time)
        ids = handle.selections[0]
        assert not torch.allclose(output, dense, atol=1e-4)
        for i in range(2):
            with handle.routed(selections=[ids[i : i + 1]]):
                torch.testing.assert_close(model(images[i : i + 1], time[i : i + 1])[0], output[i])
        with handle.force_keep(torch.ones(2, OWN["TOKENS"], dtype=torch.bool)):
            torch.testing.assert_close(model(images, time), dense)
            assert handle.selections[0].shape[1] == OWN["TOKENS"]
        assert model.eval()(images, time).equal(dense)
    assert model.train()(images, time).equal(dense)


def code_of_the_page(last: str = "") -> str:
    """The code of docs/own-model.md, up to the section `last` where one is named."""
    before = PAGE.read_text().split(f"\n## {last}\n")[0] if last else PAGE.read_text()
    return "\n".join(re.findall(r"```python\n(.*?)```", before, flags=re.DOTALL))


def test_the_page_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]):
    exec(compile(code_of_the_page("Activation checkpointing"), str(PAGE), "exec"), {"__name__": "page"})
    assert re.findall(r"```text\n(.*?)```", PAGE.read_text(), flags=re.DOTALL) == [capsys.readouterr().out]


def test_the_page_with_checkpointing():
    exec(compile(code_of_the_page(), str(PAGE), "exec"), {"__name__": "page"})


@pytest.mark.parametrize("cls", [tread.Family, tread.Stack, tread.Side, tread.Rotary])
def test_the_page_names_every_field_of_a_declaration(cls: type):
    names = {field.name for field in dataclasses.fields(cls)} - {"notes"}
    assert not {name for name in names if not re.search(rf"\b{name}=", PAGE.read_text())}


def test_the_examples_run(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    warnings.simplefilter("error", RiskWarning)  # pytest takes it back
    OWN["main"](steps=3)
    loop = runpy.run_path(str(ROOT / "examples" / "lora_loop.py"))
    assert loop["ROUTE"] == {**PRESETS["lora"].to_config(), "selection_ratio": RATIO}, "as `tread init` writes it"
    loop["main"](["--steps", "3", "--out", str(tmp_path)])
    assert (tmp_path / "pytorch_lora_weights.safetensors").is_file()
    said = capsys.readouterr().out
    assert "dense loss" in said
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"no \.safetensors files in"):
        loop["main"](["--data", str(tmp_path / "empty"), "--out", str(tmp_path)])


def test_the_guides_losses():
    """docs/attach.md: the loss on kept tokens is the same for packed tokens and for the image they are unpacked to."""
    page = (ROOT / "docs" / "attach.md").read_text()
    section = page[page.index("## When the model was trained dense") :]
    packed, image = (block.partition("```")[0] for block in section.split("```python")[1:3])
    patch, rows, columns = 2, 3, 4
    latents = torch.randn(2, 5, rows * patch, columns * patch)
    target = torch.randn_like(latents)
    for kept in (torch.rand(2, rows * columns) < 0.5, None):
        handle = SimpleNamespace(kept=kept)
        found: dict = {"handle": handle, "prediction": _packed(latents, patch), "target": _packed(target, patch)}
        exec(packed, found)
        other: dict = {"handle": handle, "prediction": latents, "target": target, "patch": patch}
        exec(image, other)
        torch.testing.assert_close(found["loss"], other["loss"])


def _packed(latents: torch.Tensor, patch: int) -> torch.Tensor:
    """(B, C, H, W) -> (B, S, C * patch * patch)"""
    cut = latents.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # (B, C, h, p, w, p)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def test_the_callback_of_the_guide(tmp_path: Path):
    """docs/attach.md: in transformers' Trainer the step counts optimizer steps, the micro-step their batches."""
    page = (ROOT / "docs" / "attach.md").read_text()
    callback = page[page.index("## In other trainers") :].split("```python")[1].partition("```")[0]
    seen: list[dict[str, int]] = []

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = OWN["PixelTransformer"]()

        def forward(self, images: torch.Tensor, time: torch.Tensor) -> dict[str, torch.Tensor]:
            loss = self.transformer(images, time).square().mean()
            seen.append(handle.state_dict())
            return {"loss": loss}

    model = Flow()
    handle = tread.attach(model.transformer, {"routes": [route(1, -2)]}, family=OWN["FAMILY"])
    found: dict = {"handle": handle, "TrainerCallback": transformers.TrainerCallback}
    exec(callback, found)
    settings = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "report_to": []}
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, save_strategy="no", **settings)
    data: Any = [{"images": torch.randn(OWN["SHAPE"]), "time": torch.rand(())} for _ in range(8)]
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[found["SetStep"]()]).train()
    assert [(state["step"], state["micro_step"]) for state in seen] == [(0, 1), (0, 2), (1, 1), (1, 2)]
