"""The command: help, exit codes, and one sentence without a traceback for everything a user can get wrong."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.programs import ROOT
from tests.tiny.runs import forget, write_latents
from tread import __version__
from tread.cli import COMMANDS, main

ROUTES = '{"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 2}]}'
TINY = [
    *["train", "model.depth=5", "model.width=16", "model.heads=2", "train.batch_size=8", "train.precision=float32"],
    *["train.steps=2", "sample.every=0", "validation.samples=4", "log.trackers=none", f"model.tread_config={ROUTES}"],
]
LATENTS = [*TINY, "data=latents", "data.num_classes=3"]

Fail = Callable[..., str]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On the CPU, in a folder of its own, as a fresh process would be."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TREAD_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    forget()


@pytest.fixture
def fail(capsys: pytest.CaptureFixture[str]) -> Fail:
    """Runs a command that must end with a code and one line on stderr; returns the line."""

    def run(*arguments: str, code: int = 2) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(arguments)
        forget()
        assert end.value.code == code
        lines = [line for line in capsys.readouterr().err.split("\n") if line and "\r" not in line]
        assert len(lines) == 1, lines
        return lines[0]

    return run


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["-h"], ["--help"]):
        main(arguments)
        shown = capsys.readouterr().out
        assert shown.startswith("usage: tread COMMAND ...")
        for name, function in COMMANDS.items():
            assert f"  {name:<10}{function.__doc__}" in shown
    main(["--version"])
    assert capsys.readouterr().out == f"tread {__version__}\n"


WORDS = {
    "train": ["[FILE.yaml] [name=value ...]", "batch_size: ", "# data=latents", "# model=dit", "# objective=edm"],
    "sample": ["--classes", "--per-class", "--guidance", "--vae", "--out"],
    "encode": ["--vae", "--out", "--size", "--kind"],
    "plan": ["--depth", "--width", "--tokens", "--resolution", "--html", "--checkpointing"],
    "families": ["only classes with this in their name"],
    "finetune": ["--check", "--json", "key=value"],
    "init": ["--model", "--data"],
    "doctor": ["[--json] [CONFIG] [name=value ...]", "what this machine has", "Exit status: 0"],
    "autotune": ["--target-speedup", "--max-loss-gap", "--pareto", "--budget-minutes", "--verify", "name=value"],
    "eval": ["with a reference: FID and", "--ref", "--features", "--weights", "--json"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code = 0
    try:
        main([command, "--help"])
    except SystemExit as end:
        code = end.code
    assert not code
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: tread {command}")
    assert [word for word in WORDS.get(command, []) if word not in shown] == []


def test_unknown_command_and_arguments(fail: Fail, capsys: pytest.CaptureFixture[str]) -> None:
    known = f"Choose one of: {', '.join(COMMANDS)}."
    assert fail("trian") == f"tread: there is no command 'trian'. Did you mean 'train'? {known}"
    assert fail("xx") == f"tread: there is no command 'xx'. {known}"
    said = fail("init", "fluxx", "--model", "m", "--data", "d")
    assert said.startswith("tread init: model_family is 'fluxx'. Did you mean 'flux'? Choose one of: ")
    assert said.endswith(" wan, z_image.")
    with pytest.raises(SystemExit) as end:
        main(["sample"])
    assert end.value.code == 2
    assert "the following arguments are required: run" in capsys.readouterr().err


def test_a_config_typo(fail: Fail) -> None:
    assert fail("train", "train.stepz=5") == (
        "tread train: there is no setting train.stepz. Did you mean 'train.steps'? `tread train --help` lists them all."
    )
    assert fail("train", "model=tred") == "tread train: there is no model=tred; choose one of: tread, dit."
    assert fail(*TINY, f"model.tread_config={ROUTES.replace('0.5', '1.5')}").startswith(
        "tread train: routes[0]: selection_ratio of route 2..2 at 1.5 is 1.5; allowed is 0 <= value < 1."
    )


def test_a_missing_shard(fail: Fail, tmp_path: Path) -> None:
    write_latents(tmp_path / "shards" / "000.tar", count=16)
    assert fail(*LATENTS, "data.path=nowhere").startswith("tread train: no shards at nowhere: set data.path to")
    assert fail(*LATENTS, "data.path=shards/{000..001}.tar").startswith(
        "tread train: shard shards/001.tar of data.path shards/{000..001}.tar is missing"
    )


def test_a_corrupt_shard(fail: Fail, tmp_path: Path) -> None:
    shard = write_latents(tmp_path / "shards" / "000.tar", count=16)
    os.truncate(shard, shard.stat().st_size // 2)
    line = fail(*LATENTS, "data.path=shards")
    assert line.startswith("tread train: shard shards/000.tar is truncated or not a plain tar")
    assert line.endswith(": copy or write it again")


def test_a_label_outside_the_classes(fail: Fail, tmp_path: Path) -> None:
    write_latents(tmp_path / "shards" / "000.tar", count=16, last={"cls": 7})
    assert fail(*LATENTS, "data.path=shards").startswith(
        "tread train: sample 0015 in shards/000.tar has label 7, outside 0..2 (1 such sample"
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_latents_that_are_not_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.chdir(tmp_path)
    write_latents(
        tmp_path / "shards" / "000.tar", count=16, last={"latent.npy": np.full((4, 4, 4), np.nan, np.float32)}
    )
    forget()
    main([*LATENTS, "data.path=shards", "train.steps=8", f"train.workers={workers}", "output_dir=run"])
    (line,) = Path("run/skipped.txt").read_text().splitlines()
    assert line.startswith("sample 0015 in shards/000.tar has NaN or infinite values: encode it again")


@pytest.mark.parametrize("folder", ["file/run", "/proc/run"])
def test_a_folder_that_cannot_be_written(fail: Fail, tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    line = fail(*TINY, f"output_dir={folder}")
    assert line.startswith(f"tread train: cannot write to output_dir {folder!r}: ")
    assert line.endswith(". Name another output_dir.")


def test_a_disk_that_fills_up(fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert fail(*TINY, "output_dir=run") == (
        "tread train: cannot write run/config.yaml (No space left on device): free space, make it writable, or name "
        "another folder."
    )


def test_checkpoints_that_do_not_serve(fail: Fail, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*TINY, "output_dir=run", "checkpoint.every=1"])
    forget()
    assert fail("train", "resume=run", "model.width=32") == (
        "tread train: model.width is 32, but the weights in run were trained with 16: set it back, or begin a run in "
        "another output_dir, without resume."
    )
    assert fail(*TINY, "output_dir=run").startswith(
        "tread train: run already holds a run: continue it with resume=latest"
    )
    assert fail("train", "resume=nowhere") == (
        "tread train: 'nowhere' is not the folder of a run: it has no config.yaml."
    )

    os.truncate(tmp_path / "run" / "checkpoints" / "step-00000002" / "model.safetensors", 50)
    capsys.readouterr()
    main(["train", "resume=run"])
    said = capsys.readouterr().out
    assert "run/checkpoints/step-00000002 is not whole: model.safetensors has 50 of" in said
    assert "resumed from run/checkpoints/step-00000001" in said

    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert fail("sample", "run") == "tread sample: run has no checkpoint yet; train it first."


def test_sampling_classes_that_the_run_does_not_know(fail: Fail) -> None:
    main([*TINY, "output_dir=run"])
    assert fail("sample", "run", "--classes", "3-12") == (
        "tread sample: --classes names class 12; this run knows classes 0-9."
    )


def test_sampling_from_a_file_of_weights_names_the_commands_that_read_it(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "DiT-XL-2-256x256.pt").write_bytes(b"weights")
    said = fail("sample", "DiT-XL-2-256x256.pt")
    assert said.startswith("tread sample: 'DiT-XL-2-256x256.pt' is a file of weights; images are drawn from a run")
    assert "`tread train model=dit model.size=XL/2 model.weights=FILE data=latents data.path=SHARDS`" in said


def test_a_vae_and_images_that_are_not_there(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "images").mkdir()
    assert fail("encode", "nowhere", "--vae", "vae", "--out", "out").startswith("tread encode: no ")
    assert "Traceback" not in fail("encode", "images", "--vae", "vae", "--out", "out")


def test_the_traceback_is_there_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREAD_DEBUG", "1")
    with pytest.raises(ValueError, match="there is no setting"):
        main(["train", "train.stepz=5"])


def test_ctrl_c_is_no_traceback(fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "plan", interrupted)
    assert fail("plan", code=130) == "tread plan: interrupted"


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: list[str]) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setitem(COMMANDS, "plan", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        main(["plan"])


SHAPE = ["--depth", "28", "--width", "1152", "--tokens", "256"]


def test_plan_shows_the_cost_of_every_form(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -4}]}
    (tmp_path / "plan.json").write_text(json.dumps({"tread_config": written}))
    (tmp_path / "train.yaml").write_text("train: {steps: 3}\nmodel: {preset: B/2, tread_config: {preset: paper}}\n")
    (tmp_path / "finetune.json").write_text(json.dumps({"--model_family": "flux", "--tread_config": written}))
    shown = []
    for form in ("paper", json.dumps(written), "plan.json", "train.yaml", "finetune.json"):
        main(["plan", form, *SHAPE])
        shown.append(capsys.readouterr().out)
    assert len(set(shown)) == 1
    assert "28 layers, width 1152, 256 tokens" in shown[0]
    assert "layers 2..24: 128 of 256 tokens (drops 50%)" in shown[0]
    assert "ideal speed-up                           1.72x" in shown[0]


def test_plan_follows_the_defaults_of_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As `tread train` reads it; what is still to be given there, such as data.path, is not asked for."""
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [config, {override data: latents}, _self_]\nmodel: {preset: B/2}\n")
    for config in (str(file), str(ROOT / "configs" / "config.yaml"), str(ROOT / "recipes" / "dit-s-2.yaml"), "paper"):
        main(["plan", config, *SHAPE])
        assert "layers 2..24: 128 of 256 tokens (drops 50%)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "window"),
    [
        ("small.yaml", "data: {name: digits}", "2..24"),  # the routes of the default model
        ("held.json", '{"validation": {"every": 5}}', "2..24"),
        ("config.env", "MODEL_FAMILY=flux\nTREAD_CONFIG=lora", "3..24"),
        ("flat.json", '{"--model_family": "flux", "--tread_config": "lora", "data_backend_config": "gone"}', "3..24"),
        ("outer.yaml", "tread_config: {preset: lora}", "3..24"),
    ],
)
def test_plan_reads_every_config_of_a_job(
    name: str, text: str, window: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    main(["plan", name, *SHAPE])
    assert f"layers {window}:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.yaml", "model: {preset: B/2, tread_config: null}"),
        ("mine.yaml", "defaults: [config, {override model: dit}, _self_]"),
        ("tune.json", '{"--model_family": "flux", "--data": "photos"}'),
    ],
)
def test_plan_says_that_a_run_is_dense(
    name: str, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    main(["plan", name, *SHAPE])
    assert capsys.readouterr().out.startswith(
        f"{name} has no tread_config: the run is dense, every layer sees all 256 tokens. Name a preset"
    )


def test_plan_warns_of_risks_and_refuses_mistakes(
    fail: Fail, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(["plan", "max-speed", *SHAPE])
    warned = capsys.readouterr().err
    assert warned.count("warning: route 1..27 at 0.7") == 3
    (tmp_path / "numbers.yaml").write_text("1: 2")
    assert fail("plan", str(tmp_path / "numbers.yaml"), *SHAPE).startswith("tread plan: tread_config: unknown key '1'.")
    assert fail("plan", "papr", *SHAPE).startswith("tread plan: tread_config is 'papr': no preset (balanced, ")
    assert fail("plan", "paper", "--depth", "3", "--width", "64", "--tokens", "64").startswith(
        "tread plan: end_layer_idx -4 of route 2..-4 at 0.5 is outside a model of 3 layers"
    )
    assert fail("plan", "paper", *SHAPE[:-1], "0") == "tread plan: --tokens is 0; it must be at least 1."


def test_as_a_process(tmp_path: Path) -> None:
    """The installed script: exit code, and nothing but the sentence on stderr."""
    tread = Path(sys.executable).with_name("tread")
    process = subprocess.run([tread, "train", "model=tred"], capture_output=True, text=True, cwd=tmp_path)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "tread train: there is no model=tred; choose one of: tread, dit.\n"


@pytest.mark.parametrize("module", ["tread", "tread.cli"])
def test_as_a_module(module: str) -> None:
    """A module that ends in silence, with status 0, would look like a command that had nothing to do."""
    said = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith("tread ")


def test_a_reader_that_stops_reading_is_no_error() -> None:
    """As in `tread train --help | head`."""
    command = [sys.executable, "-m", "tread", "train", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
