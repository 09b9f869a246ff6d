"""The tokens on the page are those that training kept, computed again from the record of the run."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.page.conftest import ROUTES, SCHEDULE, write_run
from tests.tiny.runs import train
from tread.cli import main
from tread.page.kept import (
    CELL,
    COVER,
    RAMP,
    SAMPLES,
    _covered,
    _fitted,
    _heat,
    grid_cells,
    heat_map,
    kept_tokens,
    layer_shares,
    sample_pictures,
    selection,
)
from tread.page.read import read_run
from tread.sampling.grid import GAP
from tread.training.session import Session

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """The selections of every step that is trained meanwhile, by route; empty for a dense one."""
    found: list[list[Tensor]] = []
    step = Session.step

    def watched(self: Session, *arguments: Any) -> Any:
        values = step(self, *arguments)
        found.append([ids.clone() for ids in self.task.routing[0].selections])
        return values

    monkeypatch.setattr(Session, "step", watched)
    return found


def check(folder: Path, recorded: list[list[Tensor]], batch: int) -> int:
    """Compare every recorded selection with the page's; returns how many there were."""
    run, compared = read_run(folder), 0
    assert run.plan is not None
    assert run.grid is not None
    for step, routes in enumerate(recorded):
        for route, ids in enumerate(routes):
            assert torch.equal(selection(run.plan, route, step, torch.arange(batch), math.prod(run.grid)), ids)
            compared += 1
    return compared


def test_of_pretraining(tmp_path: Path, recorded: list[list[Tensor]]) -> None:
    """Two routes, whose ratio climbs and falls to 0 at the end."""
    config = json.dumps({"routes": ROUTES, "schedule": SCHEDULE})
    folder = train(tmp_path / "run", "train.steps=16", "train.seed=3", f"model.tread_config={config}")
    assert check(folder, recorded, batch=8) == 2 * (16 - 2 - 4)  # dense are the first two steps and the last four


def test_of_fine_tuning(tmp_path: Path, recorded: list[list[Tensor]], tune_config: dict[str, Any]) -> None:
    (tmp_path / "c.json").write_text(json.dumps(tune_config | {"validation_steps": 0}))
    main(["finetune", "c.json"])
    assert check(tmp_path / "tuned", recorded, batch=2) > 0
    assert read_run(tmp_path / "tuned").grid == (1, 4, 4)  # 64 pixels, 8 to a latent, 2 to a token


def test_the_heat_map_counts_what_was_kept(runs: Path) -> None:
    plan = read_run(runs / "routed").plan
    assert plan is not None
    steps = [5, 6, 7]
    share, draws = heat_map(plan, 0, steps, 64)
    counts = torch.zeros(64)
    for step in steps:
        for token in selection(plan, 0, step, torch.arange(16), 64).flatten().tolist():
            counts[token] += 1
    assert draws == 48
    assert torch.equal(share * draws, counts)


def test_dropped_tokens_are_covered_and_kept_ones_are_the_picture(routed: Path) -> None:
    """Each token of each sample in the picture of one step, read back from the page's image."""
    import base64
    import io

    run = read_run(routed)
    (first, _), _ = kept_tokens(run)
    assert run.plan is not None
    step = first.first
    with Image.open(io.BytesIO(base64.b64decode(first.masks[step].uri.partition(",")[2]))) as image:
        pixels = np.asarray(image.convert("RGB")).astype(float)
    (path,) = (routed / "samples").glob("step-00000016.png")
    cells = [np.asarray(cell.convert("RGB")).astype(float) for cell in grid_cells(path, run)]
    assert len(cells) == 4
    ids = selection(run.plan, 0, step - 1, torch.arange(4), 64)
    for sample, cell in enumerate(cells):
        for token in range(64):
            row, column = token // 8, token % 8
            there = pixels[row * 14 + 7, sample * (112 + 4) + column * 14 + 7]
            own = cell[row * 6 + 3, column * 6 + 3]
            expected = own if token in ids[sample].tolist() else own * 0.15 + np.array(COVER) * 0.85
            assert np.abs(there - expected).max() <= 1
    assert "a token was kept 50.0% of the time" in first.notes[0], "the heat map has no steps of the warm-up"
    assert first.masks[step].caption == f"step {step}: 32 of 64 tokens kept (50%)"


def test_a_grid_has_no_more_rows_than_classes(tmp_path: Path) -> None:
    """Ten rows are asked for by default, and `tread train` draws one for each class there is."""
    facts = {"shape": [3, 8, 8], "num_classes": 2}
    run = read_run(write_run(tmp_path / "run", KEPT, facts=facts, sample={"per_class": 3, "classes": 10}))
    Image.new("RGB", (3 * (8 + GAP) - GAP, 2 * (8 + GAP) - GAP)).save(tmp_path / "grid.png")
    assert [cell.size for cell in grid_cells(tmp_path / "grid.png", run)] == [(8, 8), (8, 8)]


def test_each_layer_has_its_share(runs: Path) -> None:
    assert layer_shares(read_run(runs / "routed")) == [1, 0.5, 0.5, 0.75, 1]
    dense = read_run(runs / "dense")
    assert layer_shares(dense) == []
    assert kept_tokens(dense) == ([], "Every step was dense: all tokens were kept.")


FACTS = {"grid": [1, 4, 4], "depth": 4}
ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 2}
KEPT = [{"step": step, "tokens_kept": 0.5} for step in range(1, 9)]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "The run did not record its routes."),
        ({"routes": [ROUTE], "selector": "l1", "importance": 1.0}, "importance 1: the tokens' own size decides"),
        ({"routes": [ROUTE], "schedule": {"warmup_steps": 9, "levels": 1}}, "No step so far was routed."),
        ({"routes": [{"selection_ratio": "half"}]}, "The run did not record its routes."),
    ],
)
def test_what_cannot_be_shown_is_said(tmp_path: Path, config: Any, said: str) -> None:
    run = write_run(tmp_path / "run", KEPT, facts={**FACTS, "tread_config": config})
    routes, why = kept_tokens(read_run(run))
    assert routes == []
    assert said in why


def test_l1_and_forced_tokens_are_said(tmp_path: Path) -> None:
    facts = {**FACTS, "tread_config": {"routes": [ROUTE], "selector": "l1"}}
    kept = [{"step": 1, "tokens_kept": 0.75}]
    (route,), _ = kept_tokens(read_run(write_run(tmp_path / "run", kept, facts=facts)))
    _, importance, forced = route.notes
    assert importance.startswith("The selector is l1 with importance 0.5: ")
    assert importance.endswith("Shown is its random part alone.")
    assert forced.startswith("Step 1 kept 75% and not the 50% shown")


def test_the_frames_of_a_clip_are_cut_from_its_strip(tmp_path: Path) -> None:
    """Two samples of five frames, twice as wide as high, under tokens of three; dropped ones are covered."""
    colours = [(255, 0, 0), (9, 9, 9), (0, 255, 0), (9, 9, 9), (0, 0, 255)]
    facts = {"grid": [3, 2, 4], "depth": 4, "tread_config": {"routes": [ROUTE]}}
    path = write_run(tmp_path / "run", KEPT, facts=facts, model_family="wan")
    (path / "previews").mkdir()
    strip = Image.new("RGB", (5 * 64, 32))
    for frame, colour in enumerate(colours):
        strip.paste(colour, (frame * 64, 0, frame * 64 + 64, 32))
    for sample in range(2):
        strip.save(path / "previews" / f"step-00000008-{sample}.png")
    run = read_run(path)
    frames = sample_pictures(run, (3, 2, 4))
    assert [[frame.size for frame in sample] for sample in frames] == [[(64, 32)] * 5] * 2
    assert [[frame.getpixel((5, 5)) for frame in sample] for sample in frames] == [colours] * 2
    kept = np.zeros((SAMPLES, 3, 2, 4), bool)
    kept[1, 2, 1, 3] = True
    sheet = _covered(kept, frames)
    assert sheet.size == (2 * (112 + GAP) - GAP, 3 * (56 + GAP) - GAP), "as many samples as there are pictures"
    pixels = np.asarray(sheet.convert("RGB")).astype(float)
    for sample, frame, row, column in np.ndindex(2, 3, 2, 4):
        there = pixels[frame * (56 + GAP) + row * 28 + 14, sample * (112 + GAP) + column * 28 + 14]
        own = np.array(colours[2 * frame])
        expected = own if kept[sample, frame, row, column] else own * 0.15 + np.array(COVER) * 0.85
        assert np.abs(there - expected).max() <= 1


def test_a_picture_of_another_shape_is_cropped_at_its_centre() -> None:
    wide = Image.new("RGB", (96, 32), (255, 0, 0))
    wide.paste((0, 255, 0), (32, 0, 64, 32))
    cropped = np.asarray(_fitted(wide, 64, 64))
    assert cropped.shape == (64, 64, 3)
    assert (cropped[:, 4:-4] == (0, 255, 0)).all()


def test_the_heat_map_has_each_token_in_its_cell() -> None:
    """Frames beside each other, dark where a token was never kept and bright where it always was."""
    share = torch.zeros(2, 2, 3)
    share[1, 0, 2] = 1.0
    share[0, 1, 0] = 0.5
    sheet = _heat(share.flatten(), (2, 2, 3))
    cell = round(CELL * 1.5 / 3)
    assert sheet.size == (2 * (3 * cell + GAP) - GAP, 2 * cell)
    pixels = np.asarray(sheet.convert("RGB"))
    for frame, row, column in np.ndindex(2, 2, 3):
        there = pixels[row * cell + cell // 2, frame * (3 * cell + GAP) + column * cell + cell // 2]
        expected = RAMP[round(4 * float(share[frame, row, column]))]
        assert tuple(there) == tuple(expected.astype(np.uint8))
