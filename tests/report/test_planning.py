"""`tread plan MODEL` against what was measured on a GPU, and what it says of wrong settings."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ROOT, run
from tread.cli import main
from tread.finetune.families import TUNE_FAMILIES
from tread.report.planning.estimate import choices, estimate
from tread.report.planning.models import documents, find_model
from tread.report.planning.settings import make_run
from tread.report.planning.tables import RESERVED, WORKING
from tread.routing.plan import RoutePlan
from tread.routing.risks import adapter_risks, layer_risks

WITHIN = 0.10
ALONE = ["--depth", "9", "--width", "8", "--tokens", "16"]
"""The shape of a model, for routes alone."""
MODELS = {"flux": "flux", "sd3": "sd3/large", "wan": "wan", "qwen": "qwen_image", "flux2": "flux2"}
PRECISIONS = {"bf16": "bf16", "fp8-both-ways": "fp8-matmul", "fp8": "fp8", "int8": "int8"}
"""Bases by their name in the benchmarks; the others are trials, and store weights twice."""


@dataclass(frozen=True)
class Row:
    """One measurement on an H200, as a run of `tread plan`."""

    name: str
    model: str
    run: dict[str, Any]
    routes: tuple[float, int, int]
    measured: dict[str, Any]

    def __str__(self) -> str:
        return self.name


def rows() -> Iterator[Row]:
    """Every committed measurement with a memory figure whose settings `tread plan` has."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("h200-*.json")):
        document = json.loads(path.read_text())
        for job in document.get("jobs", [document]):
            for one in job.get("measurements", []):
                if (one.get("dense") or {}).get("peak_gib") and (row := read(path.stem, one)):
                    yield row


def read(file: str, one: dict[str, Any]) -> Row | None:
    variant, shapes = one.get("variant") or {}, one["shapes"]
    name = f"{file}, {one['row']}, {one['name']}"
    if one["row"].startswith("dit"):
        if variant["float8"] is not None:  # another precision of the products, which `tread plan` does not have
            return None
        end = {"XL/2": 24, "B/2": 8}[shapes["model"]]
        settings = {"resolution": "256", "batch": shapes["batch"], "graphs": variant.get("graphs", False)}
        return Row(name, f"dit/{shapes['model']}", settings, (0.5, 2, end), one)
    if one["row"].startswith("family-"):
        model = find_model(one["row"].removeprefix("family-"))
        latent_frames = shapes["image_tokens"] // (480 // model.multiple * (832 // model.multiple)) * model.patch[0]
        settings = {"text": shapes["text_tokens"], "checkpointing": "full", "graphs": one["name"] == "graphs"}
        clip = {"resolution": "832x480", "frames": 1 + (latent_frames - 1) * model.frame_factor}
        settings |= clip if model.video else {} if model.image_layers else {"resolution": "1024"}
        settings["references"] = 0 if model.image_layers else shapes.get("references", 0)
        return Row(name, one["row"].removeprefix("family-"), settings, (0.5, 2, -2), one)
    if one["row"].startswith("recipe-"):
        settings = {"resolution": str(shapes["resolution"]), "text": shapes["text_tokens"]}
        settings |= {"precision": shapes["base"], "rank": shapes["lora_rank"], "references": shapes["references"]}
        settings |= {"checkpointing": "full", "graphs": one["name"] == "graphs"}
        return Row(name, shapes["model"], settings, (0.25, 3, -4), one)
    base = variant.get("base", "bf16")
    if base not in PRECISIONS:
        return None
    looped = one["row"].startswith("loop-")
    model = MODELS[one["row"].split("-")[1 if looped else 0]]
    modes = {"selective": "selective", "dense-steps": "dense"}
    settings = {
        "resolution": "832x480" if model == "wan" else "1024",
        "text": shapes["text_tokens"],
        "precision": PRECISIONS[base],
        "checkpointing": modes.get(one["name"], "full" if one["checkpointed"] else "none"),
        "graphs": one["name"] not in ("own-compile", "eager") if looped else variant.get("graphs", False),
    }
    if model not in documents():
        return None
    if "attention" in find_model(model).lora:  # the benchmarks' adapters are on attention alone
        settings["way"] = "attention"
    return Row(name, model, settings, (0.5, 2, -2), one)


ROWS = list(rows())


def planned(row: Row) -> Any:
    model = find_model(row.model)
    ratio, start, end = row.routes
    config = {"routes": [{"selection_ratio": ratio, "start_layer_idx": start, "end_layer_idx": end}]}
    return estimate(model, make_run(model, **row.run), RoutePlan.from_config(config).resolve(model.depth))


def planned_gib(row: Row) -> tuple[float, float]:
    """Memory of a dense and of a routed step; where the two differ in checkpointing, their graphs share one pool."""
    dense, routed = planned(row).gib
    together = max(dense, routed)
    return (together, together) if row.run.get("checkpointing") == "dense" else (dense, routed)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_memory_is_what_was_measured(row: Row) -> None:
    for gib, kind in zip(planned_gib(row), ("dense", "routed"), strict=True):
        measured = row.measured[kind]["peak_gib"]
        assert gib == pytest.approx(measured, rel=WITHIN), kind


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_flops_are_what_torch_counted(row: Row) -> None:
    """The benchmarks counted whole eager steps on the GPU, at full depth and width."""
    found = planned(row)
    if row.name.startswith("h200-loop") and row.run["checkpointing"] in ("selective", "dense"):
        return  # counted on eager steps, which were checkpointed in full or not at all
    if row.run.get("precision") == "nf4":  # bitsandbytes' products are no operations that torch counts
        return
    for flops, kind in zip(found.flops, ("dense", "routed"), strict=True):
        assert flops / 1e12 == pytest.approx(row.measured[f"{kind}_tflop"], rel=0.002), kind
    assert found.speedup == pytest.approx(row.measured["ideal"], rel=0.002)


def test_masks_of_pairs_are_copied_once_as_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """HunyuanVideo 1.5: a mask of all tokens by all tokens, in bf16; HunyuanVideo 1.0 has a row of keys."""
    more: dict[str, float] = {}
    for name in ("hunyuanvideo", "hunyuanvideo1"):
        model = find_model(name)
        plan = RoutePlan.from_config("paper").resolve(model.depth)
        run = make_run(model, resolution="832x480", frames=121, text=300, batch=1, checkpointing="full")
        found = estimate(model, run, plan)
        with monkeypatch.context() as patch:
            patch.setattr("tread.report.planning.estimate.BIAS_BYTES", 0)
            more[name] = found.memory[0]["working"] - estimate(model, run, plan).memory[0]["working"]
        assert more[name] == (2 * (found.image + 300) ** 2 if name == "hunyuanvideo" else 0)


def test_enough_rows_were_compared() -> None:
    assert len(ROWS) >= 35
    assert {row.model for row in ROWS} >= {"flux", "sd3/large", "wan", "qwen_image", "dit/XL/2", "dit/B/2"}
    assert {row.run.get("checkpointing") for row in ROWS} >= {"none", "selective", "full", "dense"}
    assert {row.run.get("precision") for row in ROWS} >= {"bf16", "fp8-matmul"}


def test_every_family_of_fine_tuning_can_be_planned() -> None:
    assert set(TUNE_FAMILIES) <= set(documents())


@pytest.mark.parametrize("layers", [1, 4, 7])
def test_layers_are_drawn_with_their_image_which_is_also_given(layers: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen-Image-Layered at 640 x 480 pixels: 1,200 tokens an image, those of the given one kept."""
    words = ["plan", "qwen_layered", "--resolution", "640x480", "--image-layers", str(layers), "--routes", "balanced"]
    main([*words, "--json"])
    told = json.loads(capsys.readouterr().out)
    drawn = 1200 * (1 + layers)
    assert told["tokens"] == {"image": drawn, "reference": 1200, "padding": 0, "text": 256}
    assert told["layers"][0]["tokens"] == drawn + 1200
    assert told["layers"][10]["tokens"] == drawn // 2 + 1200
    main(words)
    count = f"{layers} layers" if layers > 1 else "1 layer"
    assert f"640 x 480 pixels with {count}: {drawn:,} tokens + 1,200 of the given image" in capsys.readouterr().out


def test_a_model_of_one_dtype_is_trained_in_bf16() -> None:
    model = find_model("cosmos3")
    plan = RoutePlan.from_config("paper").resolve(model.depth)
    run = make_run(model, way="full")
    assert run.precision == "bf16"
    assert {choice.precision for choice in choices(model, run, plan)} == {"bf16"}


@pytest.mark.parametrize(
    ("size", "padding"), [("512", 0), ("1024", 0), ("2048", 0), ("768x1024", 1024), ("1344x768", 64)]
)
def test_an_image_that_is_not_square_is_padded_and_padding_is_never_dropped(size: str, padding: int) -> None:
    """HiDream: 4,096 tokens, as the pipeline's own 1024 x 1024 pixels have."""
    model = find_model("hidream")
    found = estimate(model, make_run(model, resolution=size), RoutePlan.from_config("balanced").resolve(model.depth))
    assert found.padding == padding
    assert found.layers[0] == found.image + padding
    assert found.layers[10] == found.image - found.image // 2 + padding


def test_adapters_results_are_held_apart_only_in_layers_that_run_again() -> None:
    model = find_model("flux")
    without = replace(model, stacks=tuple(replace(stack, adapted={}) for stack in model.stacks))
    plan = RoutePlan.from_config("lora").resolve(model.depth)
    for checkpointing, again in (("none", False), ("selective", True), ("full", True)):
        run = make_run(model, checkpointing=checkpointing)
        held, bare = (estimate(one, run, plan).memory[0]["working"] for one in (model, without))
        assert (held > bare) is again, checkpointing


def test_every_copy_of_trained_weights_leaves_spare_segments() -> None:
    """Weights and gradients; AdamW's two moments, or Lion's one; the average."""
    model = find_model("dit/B/2")
    plan = RoutePlan.from_config("paper").resolve(model.depth)
    spare = model.weights["spare_32"]
    assert spare > 0
    for optimizer, ema, copies in (("lion", False, 3), ("adamw", False, 4), ("adamw", True, 5)):
        settings: dict[str, Any] = {"optimizer": optimizer, "ema": ema}
        graphs, eager = (
            estimate(model, make_run(model, graphs=on, **settings), plan).memory[1] for on in (True, False)
        )
        capture = WORKING["graphs"] * eager["activations"]
        assert graphs["working"] - eager["working"] - capture == pytest.approx(copies * spare), optimizer


@pytest.mark.parametrize("name", documents())
def test_every_model_and_way_can_be_planned(name: str) -> None:
    model = find_model(name)
    plan = RoutePlan.from_config("balanced").resolve(model.depth)
    for way in model.ways:
        gib = []
        for checkpointing in ("none", "selective", "full"):
            found = estimate(model, make_run(model, way=way, checkpointing=checkpointing), plan)
            assert found.gib[1] <= found.gib[0]
            assert 1 < found.speedup < 4
            gib.append(found.gib)
        assert gib == sorted(gib, reverse=True), "checkpointing saves memory"


def test_dense_steps_alone_are_checkpointed() -> None:
    """A dense step is that of full checkpointing, a routed one that of none."""
    model = find_model("flux")
    plan = RoutePlan.from_config("balanced").resolve(model.depth)
    none, full, dense = (estimate(model, make_run(model, checkpointing=how), plan) for how in ("none", "full", "dense"))
    assert dense.flops == (full.flops[0], none.flops[1])
    assert dense.memory == (full.memory[0], none.memory[1])
    assert dense.layer_flops == none.layer_flops


def test_references_are_kept_unless_they_may_be_routed() -> None:
    model = find_model("flux/kontext")
    run = make_run(model, references=1)
    counts = {}
    for how in ("keep", "route"):
        config = {"preset": "balanced", "reference_tokens": how}
        counts[how] = estimate(model, run, RoutePlan.from_config(config).resolve(model.depth)).layers[10]
    assert counts == {"keep": 4096 + 2048, "route": 4096}


def test_a_card_fits_what_it_has_left() -> None:
    model = find_model("flux")
    plan = RoutePlan.from_config("lora").resolve(model.depth)
    found = choices(model, make_run(model), plan)
    assert len(found) == 9
    for choice in found:
        for gib, card in zip(choice.gib, choice.cards, strict=True):
            assert card is None or gib <= card - RESERVED
    assert min(choice.cards[1] or 999 for choice in found) == 12


def test_the_text_and_the_json_agree(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "flux", "--resolution", "1024", "--batch", "1", "--lora", "16", "--checkpointing"]
    main(words)
    text = capsys.readouterr().out
    main([*words, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert "FLUX.1 dev" in text
    assert "  3..18        2,458" in text
    assert f"{told['speedup']:.2f}x" in text
    for kind in ("dense", "routed"):
        assert f"{told['gib'][kind]:.2f}" in text
        assert sum(told["memory"][kind].values()) == pytest.approx(told["gib"][kind] * 2**30)
    assert told["settings"]["checkpointing"] == "full"
    assert len(told["layers"]) == 57
    assert told["warnings"] == []


def test_warnings_are_those_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "flux", "--routes", "max-speed"])
    said = capsys.readouterr().err.splitlines()
    main(["plan", "flux", "--routes", "max-speed", "--json"])
    told = json.loads(capsys.readouterr().out)["warnings"]
    assert said == [f"warning: {one}" for one in told]
    plan = RoutePlan.from_config("max-speed").resolve(57)
    assert told == layer_risks(plan) + adapter_risks(plan)
    main(["plan", "flux", "--full", "--routes", "max-speed", "--json"])
    assert json.loads(capsys.readouterr().out)["warnings"] == layer_risks(plan)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["flx"], "'flx' is no model that `tread plan` knows. Did you mean 'flux'?"),
        (["flux", "--resolution", "1000"], "--resolution is 1000, and sides of flux are multiples of 16 pixels: use"),
        (
            ["flux", "--resolution", "8"],
            "--resolution is 8, and sides of flux are multiples of 16 pixels: use 16 or 32 instead of 8.",
        ),
        (["flux", "--resolution", "big"], "--resolution is 'big'; give a side in pixels such as 1024, or"),
        (["hidream", "--resolution", "1280x1024"], "--resolution is 1280x1024, which is 5120 tokens, and"),
        (["qwen_image21", "--resolution", "1040"], "--resolution is 1040, and sides of qwen_image21 are"),
        (["flux", "--frames", "5"], "--frames is 5, but flux is a model of images; leave it out."),
        (["wan", "--frames", "80"], "--frames is 80, and clips of wan have 1 + a multiple of 4 frames: use 77 or 81."),
        (["flux", "--references", "1"], "--references is 1, but flux takes no reference images; leave it out."),
        (["flux", "--routes", '{"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 57}]}'],
         "end_layer_idx 57 of route 2..57 at 0.5 is outside a model of 57 layers"),
        (["flux", "--routes", "papr"], "--routes is 'papr': no preset"),
        (["flux", "--routes", "paper.yml"], "--routes is 'paper.yml': no preset"),
        (["paper"], "'paper' is a preset of routes: name the model first, as in `tread plan flux --routes paper`"),
        ([str(ROOT / "pyproject.toml")], f"'{ROOT / 'pyproject.toml'}' is a file, no model: name the model first"),
        (['{"preset": "paper"}'], "'{\"preset\": \"paper\"}' are routes: name the model first"),
        (["flux", "--full", "--lora", "8"], "--lora is 8, but --full trains all weights; leave one of them out."),
        (["flux", "--full", "--targets", "own"], "--targets is own, but --full trains all weights; leave one of them"),
        (["dit/S/2", "--lora", "8"], "--lora is 8, but dit/S/2 is trained from scratch, all weights; leave it out."),
        (["dit/S/2", "--targets", "attention"], "--targets is attention, but dit/S/2 is trained from scratch"),
        (["dit/S/2", "--text", "7"], "--text is 7, but dit/S/2 reads no text; leave it out."),
        (["flux", "--per-node", "4"], "--per-node is for several GPUs: give --gpus too."),
        (["flux", "--shard-size", "4"], "--shard-size is for several GPUs: give --gpus too."),
        (["flux", *ALONE], "flux is a model, whose shape is known:"),
        (["flux", "--precision", "int9"], "--precision is 'int9'; where an adapter is trained it must be one of:"),
        (["flux", "--full", "--precision", "nf4"], "--precision is 'nf4'; where all weights are trained it must be"),
        (["flux", "--image-layers", "3"], "--image-layers is 3, but flux does not take images apart into layers;"),
        (["qwen_layered", "--image-layers", "0"], "--image-layers is 0; it must be at least 1."),
        (["qwen_layered", "--references", "1"], "--references is 1, but qwen_layered takes no reference images;"),
        (["cosmos3", "--batch", "2"], "--batch is 2, but cosmos3 is trained with one sample at a time: leave it out"),
        (["qwen_image21", "--batch", "2"], "--batch is 2, but qwen_image21 is trained with one sample at a time"),
        (["cosmos3", "--precision", "fp32"], "--precision is 'fp32'; where an adapter is trained it must be one of:"),
        (["flux", "--batch", "0"], "--batch is 0; it must be at least 1."),
        (["flux", "--lora", "0"], "--lora is 0; it must be at least 1."),
        (["flux", "--optimizer", "sgd"], "--optimizer is 'sgd'"),
        (["flux", "--html", "no/such/page.html"], "cannot write no/such/page.html (No such file"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", *words])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tread plan: {sentence}")
    assert said.count("\n") == 1
    assert len(said) <= 520


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["flux", "--context", "77"], "--context is for routes alone, with --depth, --width and --tokens; a model has"),
        (["paper", *ALONE, "--json"], "--json is for a model by name; routes alone take --depth, --width, --tokens"),
        (["paper", *ALONE, "--per-node", "2"], "--per-node is for a model by name; routes alone take --depth"),
    ],
)
def test_options_of_the_other_use_are_refused(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", *words])
    assert end.value.code == 2
    assert f"tread plan: error: {sentence}" in capsys.readouterr().err


def test_the_models_are_all_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where nothing is close: nobody can guess the names."""
    with pytest.raises(SystemExit):
        main(["plan", "something"])
    said = capsys.readouterr().err
    assert "..." not in said
    for name in documents():
        base, *flavour = name.split("/")
        assert f" {base}" in said
        assert not flavour or flavour[0].removeprefix("/") in said.partition(f" {base}")[2]


def test_a_page_that_may_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "flux", "--html", str(tmp_path)])
    assert "Is a directory" in capsys.readouterr().err


def test_planning_a_model_needs_no_torch() -> None:
    code = "import sys; from tread.cli import main; main(['plan', 'flux']); print('torch' in sys.modules)"
    assert run("-c", code).splitlines()[-1] == "False"
