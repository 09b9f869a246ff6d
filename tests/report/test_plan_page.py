"""The page of `tread plan --html` in a browser: its numbers are the command's; readers drag, copy and share."""

import itertools
import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.browser import PHONE, Browser
from tread.cli import main
from tread.report.planning.models import Model, documents, find_model
from tread.report.planning.settings import precisions_of
from tread.report.planning.tables import OPTIMIZERS
from tread.routing import noise
from tread.routing.plan import PRESETS
from tread.routing.selection import l1_rank, mixed_score, select

SETTINGS = 50
STATE = "return {...state, found: estimate(state), fits: choicesOf(state)}"


@pytest.fixture
def page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "plan.html"
    main(["plan", "flux", "--html", str(path)])
    assert capsys.readouterr().out.endswith(f"page: {path}\n")
    return path


def drawn(number: random.Random, model: Model) -> list[str]:
    """Options of `tread plan`, drawn at random."""
    sides = [str(number.randint(2, 96) * model.multiple) for _ in range(2)]
    if model.padded and int(sides[0]) * int(sides[1]) > model.padded * model.multiple**2:
        sides[1] = sides[0]
    start = number.randrange(model.depth)
    end = number.randrange(start, model.depth)
    route = {"selection_ratio": number.choice([0.1, 0.25, 0.5, 0.7, 0.9]), "start_layer_idx": start}
    routes = [route | {"end_layer_idx": number.choice([end, end - model.depth])}]
    if end < model.depth - 2:
        routes.append({"selection_ratio": 0.33, "start_layer_idx": end + 1, "end_layer_idx": -1})
    config: dict[str, Any] = {"routes": routes, "seed": number.randrange(1000)}
    if number.random() < 0.5:
        config |= {"selector": "l1", "importance": number.choice([0.25, 0.5, 1.0])}
    chosen = number.choice([json.dumps(config), number.choice(list(PRESETS))])
    words = [
        "--routes",
        chosen,
        "--resolution",
        "x".join(sides),
        "--batch",
        str(1 if model.one_sample else number.choice([1, 2, 7])),
    ]
    words += ["--checkpointing", number.choice(["none", "selective", "full", "dense"])]
    words += ["--optimizer", number.choice(list(OPTIMIZERS))]
    words += ["--text", str(number.choice([model.text, 77]))] if model.text else []
    if model.video:
        words += ["--frames", str(1 + model.frame_factor * number.randint(0, 30))]
    if model.references:
        words += ["--references", str(number.randint(0, 3))]
    if model.image_layers:
        words += ["--image-layers", str(number.randint(1, 6))]
    if number.random() < 0.3 or not model.pretrained:
        words += ["--full", "--precision", number.choice(precisions_of(model, "full"))]
    else:
        words += ["--lora", str(number.choice([4, 16, 64]))]
        words += ["--precision", number.choice(precisions_of(model, "lora"))]
        words += number.choice([[], ["--targets", "attention"]])
    return words + number.choice([[], ["--graphs"]]) + number.choice([[], ["--ema"], ["--no-ema"]])


def reported(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["plan", *words, "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_page_computes_what_the_command_does(
    browser: Browser, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number = random.Random(0)
    names = itertools.cycle(documents())
    browser.open(page)
    for name in itertools.islice(names, SETTINGS):
        words = [name, *drawn(number, find_model(name))]
        told = reported(capsys, *words)
        start = {"model": name, **told["settings"], "tread_config": told["tread_config"]}
        shown = browser.run(
            "DATA.start = arguments[0]; state = fitted(startState()); chosen = 0; show(); " + STATE, start
        )
        assert {key: shown[key] for key in told["settings"]} == told["settings"], words
        found = shown["found"]
        parts = ("image", "reference", "padding")
        assert [found[part] for part in parts] == [told["tokens"][part] for part in parts], words
        assert found["layers"] == [layer["tokens"] for layer in told["layers"]], words
        assert found["layerFlops"] == pytest.approx([layer["flops"] for layer in told["layers"]], rel=1e-9)
        for key in ("flops", "gib"):
            assert found[key] == pytest.approx(told[key], rel=1e-9), words
        for kind in ("dense", "routed"):
            assert found["memory"][kind] == pytest.approx(told["memory"][kind], rel=1e-9, abs=1), words
        assert found["speedup"] == pytest.approx(told["speedup"], rel=1e-9)
        assert found["warnings"] == told["warnings"], words
        for mine, theirs in zip(shown["fits"], told["fits"], strict=True):
            assert (mine["precision"], mine["checkpointing"]) == (theirs["precision"], theirs["checkpointing"])
            assert [mine["cards"][kind] for kind in ("dense", "routed")] == theirs["cards"], words
            assert [mine["gib"][kind] for kind in ("dense", "routed")] == pytest.approx(theirs["gib"], rel=1e-9)
    assert browser.errors() == []


@pytest.mark.parametrize(("seed", "importance"), [(42, 0.0), (2**40 + 3, 0.0), (7, 0.3), (42, 1.0)])
def test_the_page_keeps_the_tokens_that_the_library_keeps(
    browser: Browser, page: Path, seed: int, importance: float
) -> None:
    count, kept = 1021, 400
    stream = torch.randn(1, count, 8, generator=torch.Generator().manual_seed(1))
    score = noise.bits(seed, 0, 0, 1, torch.zeros(1, 1, dtype=torch.int64), torch.arange(count))  # (1, S), route 1
    if importance:
        score = mixed_score(score, l1_rank(stream), importance)
    expected = select(score, kept)[0].tolist()
    norms = stream.abs().sum(-1)[0].tolist()
    browser.open(page)
    mask = browser.run(
        "const [seed, norms, importance, kept] = arguments; const noise = noiseBits(seed, 1, norms.length);"
        "const score = importance ? mixedScore(noise, rankOf(norms), importance) : noise;"
        "return Array.from(keptTokens(score, kept, 0))",
        seed,
        norms,
        importance,
        kept,
    )
    assert [token for token, here in enumerate(mask) if here] == expected


def test_a_reader_drags_copies_and_shares(browser: Browser, page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    browser.open(page)
    before = browser.run(STATE)
    browser.drag("#ratio", 0.75)
    browser.drag("#resolution", 0.2)
    after = browser.run(STATE)
    assert abs(after["routes"][0]["selection_ratio"] - 0.74) < 0.03
    assert after["width"] < before["width"]
    assert after["found"]["speedup"] > before["found"]["speedup"]
    text = browser.run("return document.getElementById('speedup').textContent")
    assert text == f"{after['found']['speedup']:.2f}×"
    browser.click("[data-copy=config]")
    config = json.loads(browser.clipboard())["tread_config"]
    assert config["routes"][0]["end_layer_idx"] == -4
    browser.click("[data-copy=command]")
    told = reported(capsys, *shlex.split(browser.clipboard())[2:])
    assert told["gib"] == pytest.approx(after["found"]["gib"], rel=1e-9)
    browser.click("[data-copy=link]")
    address, _, fragment = browser.clipboard().partition("#")
    assert address == page.as_uri()
    browser.open(page, fragment=fragment)
    again = browser.run(STATE)
    assert {k: again[k] for k in after if k != "found"} == {k: after[k] for k in after if k != "found"}
    assert again["found"] == after["found"]
    assert browser.errors() == []


def test_a_link_holds_the_schedule(browser: Browser, page: Path, tmp_path: Path) -> None:
    """Also where the page of the reader opens at a plan without one, and where the link says that there is none."""
    schedule = {"warmup_steps": 500, "cooldown_fraction": 0.15, "levels": 4, "total_steps": None}
    routes = [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -4}]
    scheduled = tmp_path / "scheduled.html"
    main(["plan", "flux", "--routes", json.dumps({"routes": routes, "schedule": schedule}), "--html", str(scheduled)])
    browser.open(scheduled)
    fragment = browser.run("return toHash(state)")
    browser.open(page, fragment=fragment)
    assert browser.run("return configOf(state, 57).schedule") == schedule
    browser.open(page)
    assert browser.run("return state.schedule") is None
    browser.open(scheduled, fragment=browser.run("return toHash(state)"))
    assert browser.run("return state.schedule") is None


def test_a_ratio_that_the_command_takes_is_shown_as_it_is(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    routes = [{"selection_ratio": 0.975, "start_layer_idx": 3, "end_layer_idx": -4}]
    main(["plan", "flux", "--routes", json.dumps({"routes": routes}), "--html", str(path)])
    browser.open(path)
    assert browser.run("return state.routes[0].selection_ratio") == 0.975
    assert browser.run("return document.getElementById('ratio-out').textContent") == "97.5 %"
    browser.drag("#ratio", 1.0)
    assert browser.run("return state.routes[0].selection_ratio") == 0.99


def test_text_is_a_setting_of_models_that_read_it(browser: Browser, page: Path) -> None:
    browser.open(page)
    before = browser.run("return estimate(state).gib.dense")
    browser.drag("#text", 0.0)
    assert browser.run("return [state.text, commandOf(state, 57).includes('--text 0')]") == [0, True]
    assert browser.run("return estimate(state).gib.dense") < before
    browser.open(page, fragment="model=dit/S/2&text=99")
    assert browser.run("return [state.text, document.getElementById('text-row').hidden]") == [0, True]


def test_windows_are_added_and_removed(browser: Browser, page: Path) -> None:
    browser.open(page, fragment="model=flux&routes=0.5_2_20")
    browser.click("#windows button:nth-child(2)")
    routes = browser.run("return state.routes")
    assert [(r["start_layer_idx"], r["end_layer_idx"]) for r in routes] == [(2, 20), (22, 55)]
    browser.click("#windows button:last-child")
    assert len(browser.run("return state.routes")) == 1


@pytest.mark.parametrize("name", ["flux", "flux/kontext", "wan", "cosmos3", "qwen_layered", "dit/XL/2"])
def test_every_kind_of_model_can_be_chosen(browser: Browser, page: Path, name: str) -> None:
    browser.open(page)
    browser.run(
        "const select = document.getElementById('model'); select.value = arguments[0];"
        "select.dispatchEvent(new Event('input'))",
        name,
    )
    model = find_model(name)
    shown = browser.run(
        "return ['rank-row', 'frames-row', 'references-row', 'image_layers-row', 'batch-row']"
        ".map(id => !document.getElementById(id).hidden)"
    )
    assert shown == [bool(model.lora), model.video, model.references, bool(model.image_layers), not model.one_sample]
    assert browser.run("return [state.width, state.height]") == list(model.size)
    assert browser.run("return Number(document.getElementById('frames').value)") == model.frames
    assert browser.run("return commandOf(state, 60)").count("--image-layers 4") == (name == "qwen_layered")
    assert browser.run("return state.routes[0].end_layer_idx") == model.depth - 4
    assert browser.errors() == []


CHOOSE = """const select = document.getElementById(arguments[0]); select.value = arguments[1];
    select.dispatchEvent(new Event('input'))"""


def test_another_kind_of_training_opens_at_its_defaults(
    browser: Browser, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the command does: all weights in float32 and the paper's routes from scratch, a LoRA in bf16 on the others."""
    browser.open(page)
    for control, value, words in (
        ("model", "dit/XL/2", ["dit/XL/2"]),
        ("model", "sd3", ["sd3"]),
        ("way", "full", ["sd3", "--full", "--routes", "lora"]),
        ("way", "lora", ["sd3"]),
    ):
        browser.run(CHOOSE, control, value)
        told = reported(capsys, *words)
        shown = browser.run(STATE)
        assert {key: shown[key] for key in told["settings"]} == told["settings"], value
        assert shown["routes"] == told["tread_config"]["routes"], value
    browser.run(CHOOSE, "precision", "nf4")
    browser.run(CHOOSE, "model", "flux")
    assert browser.run("return [state.precision, state.way]") == ["nf4", "lora"]


@pytest.mark.parametrize(
    "fragment",
    [
        "model=nothing",
        "width=abc&batch=-1",
        "routes=9_9",
        "routes=5_500_900",
        "way=x&precision=y",
        "%%%",
        "schedule=1_2_x",
    ],
)
def test_a_broken_link_opens_the_nearest_plan(browser: Browser, page: Path, fragment: str) -> None:
    browser.open(page, fragment=fragment)
    assert browser.run("return document.getElementById('speedup').textContent").endswith("×")
    assert browser.errors() == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (PHONE, False)])
def test_the_page_fits_its_window_and_loads_nothing(
    browser: Browser, page: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    browser.open(page, width=width, dark=dark)
    assert browser.errors() == []
    assert browser.resources() == []
    assert browser.overflow() == 0
    unnamed = browser.run(
        "return [...document.querySelectorAll('input, select, button, canvas, svg')]"
        ".filter(e => !(e.labels?.length || e.ariaLabel || e.textContent.trim())).map(e => e.id)"
    )
    assert unnamed == []
    with Image.open(browser.screenshot(tmp_path / "page.png")) as shot:
        colours = shot.convert("RGB").getcolors(2**24)
        assert colours is not None
        assert len(colours) > 500, "the example is drawn"
        background = shot.convert("L").getpixel((2, 2))
    assert isinstance(background, int | float)
    assert (background < 64) == dark


def test_without_scripts_the_page_says_what_to_do(browser: Browser, page: Path) -> None:
    browser.open(page, scripts=False)
    text = browser.run("return document.body.innerText")
    assert "tread plan MODEL" in text
    assert "Resolution" not in text, "controls that move nothing are not shown"
