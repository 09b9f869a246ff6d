"""Work that a kill or a broken file used to cost: results missing or stale, and runs begun anew over others."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.finetune.tasks import ROUTES
from tests.tiny.pictures import write_noise
from tread.cli import main
from tread.finetune.result.write import has_result
from tread.training.checkpoint import list_checkpoints, read_manifest
from tread.training.job import LOCK_FILE, locked

pytestmark = pytest.mark.filterwarnings("ignore")
Folder = Callable[[str], Path]
LORA, FULL = "pytorch_lora_weights.safetensors", "transformer"
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"learning_rate": 0.02, "use_ema": True, "validation_prompt": "a cat", "tread_config": ROUTES},
    "full": {"learning_rate": 1e-3, "model_type": "full"},
}


@dataclass(frozen=True)
class Lab:
    """A place for runs of one base model on the same data."""

    folder: Path
    base: Path

    def command(self, name: str, kind: str, *settings: str) -> list[str]:
        """`tread finetune` of four steps with a checkpoint every two, in `NAME/run`; it resumes what is there."""
        config = self.folder / f"{kind}.json"
        keys = {
            "model_family": "flux",
            "pretrained_model_name_or_path": str(self.base),
            "data": {"instance_data_dir": str(self.folder / "data"), "resolution": 64},
            "cache_dir": str(self.folder / "cache"),
            "resume_from_checkpoint": "latest",
            "tokenizer_max_length": 32,
            "max_train_steps": 4,
            "train_batch_size": 2,
            "checkpoint_step_interval": 2,
            "eval_steps_interval": 2,
            "validation_steps": 2,
            "validation_num_inference_steps": 1,
            "mixed_precision": "no",
            "report_to": "none",
        }
        config.write_text(json.dumps(keys | KINDS[kind]))
        return ["finetune", str(config), f"output_dir={self.run(name)}", *settings]

    def run(self, name: str) -> Path:
        return self.folder / name / "run"  # a card begins with the last word

    def train(self, name: str, kind: str, *settings: str) -> Path:
        main(self.command(name, kind, *settings))
        return self.run(name)


@pytest.fixture(scope="module")
def lab(pipeline_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("lab")
    write_noise(folder / "data", [(64, 64)] * 4)
    return Lab(folder, pipeline_folder("flux"))


@pytest.fixture(scope="module")
def straight(lab: Lab) -> Callable[[str], Path]:
    """`straight("lora")`: a run that nothing happened to; not to be written to."""
    return lambda kind: lab.run(kind) if lab.run(kind).exists() else lab.train(kind, kind)


def files(folder: Path) -> dict[str, Any]:
    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*") if path.is_file()}


def content(path: Path) -> Any:
    """The bytes of a file; of tensors, the header read, because the order of its entries is drawn."""
    found = path.read_bytes()
    if path.suffix != ".safetensors" or len(found) < 1000:
        return found
    start = 8 + int.from_bytes(found[:8], "little")
    return json.loads(found[8:start]), found[start:]


def result(folder: Path) -> dict[str, Any]:
    """Everything in a run's folder that is for others, and whatever a kill left; of the record, what is not random."""
    ours = {"checkpoints", "config.yaml", "metrics.jsonl", "run.json", "report.html", "previews", LOCK_FILE}
    found = {name: content for name, content in files(folder).items() if Path(name).parts[0] not in ours}
    return found | {"result.json": json.loads(found["result.json"]) | {"checkpoint": None}}


def is_current(folder: Path) -> bool:
    return has_result(folder, read_manifest(list_checkpoints(folder / "checkpoints")[-1]))


def kill(command: list[str], name: str, times: int) -> None:
    """Run a command until something gets its name the n-th time: everything a run writes is renamed into place."""
    replace, left = os.replace, times

    def kill_or_replace(source: Any, target: Any, **options: Any) -> None:
        nonlocal left
        left -= Path(target).name == name
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target, **options)

    def run() -> None:
        os.replace = kill_or_replace
        main(command)

    process = multiprocessing.get_context("fork").Process(target=run)  # it has torch loaded already
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("kind", "name", "times"),
    [
        ("lora", LORA, 1),  # there is no result at all
        ("lora", LORA, 2),  # there is that of step 2
        ("lora", "result.json", 2),  # all of it is there, and nothing says so
        ("full", FULL, 1),
        ("full", FULL, 2),  # the old folder has left its place
        ("full", "README.md", 2),
    ],
)
def test_a_result_that_a_kill_prevented_is_made_by_the_same_command(
    lab: Lab, straight: Any, kind: str, name: str, times: int, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = straight(kind)
    killed = f"{kind}-{name}-{times}"
    command = lab.command(killed, kind, *(["checkpoint_step_interval=4"] if times == 1 else []))
    kill(command, name, times)
    folder = lab.run(killed)
    assert [path.name for path in list_checkpoints(folder / "checkpoints")][-1] == "step-00000004"
    assert not is_current(folder)
    if (kind, times) == ("full", 2):  # a whole model is always there: the old one or the new one
        whole = next(path for path in (folder / FULL, folder / f".{FULL}.old") if path.exists())
        assert load_file(whole / "diffusion_pytorch_model.safetensors")
        assert (whole / "config.json").is_file()
    main(command)
    assert "the run is at step 4 already" in capfd.readouterr().out
    assert is_current(folder)
    assert result(folder) == result(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_that_is_lost_or_broken_is_made_again_and_one_that_is_whole_is_left(
    lab: Lab, straight: Any, kind: str
) -> None:
    folder, expected = lab.train(f"again-{kind}", kind), result(straight(kind))
    weights = folder / (LORA if kind == "lora" else f"{FULL}/diffusion_pytorch_model.safetensors")
    (folder / "README.md").write_text("an edited card")
    before = weights.stat().st_ino
    lab.train(f"again-{kind}", kind)
    assert weights.stat().st_ino == before
    assert (folder / "README.md").read_text() == "an edited card"
    for damage in (
        lambda: (weights.unlink(), (folder / "README.md").unlink()),
        lambda: os.truncate(weights, weights.stat().st_size - 8),
        lambda: weights.write_bytes(bytes(weights.stat().st_size)),
        lambda: (folder / "result.json").write_text("{"),
    ):
        damage()
        lab.train(f"again-{kind}", kind)
        assert result(folder) == expected


def test_a_result_half_of_another_checkpoint_is_replaced(lab: Lab, straight: Any) -> None:
    """The new adapter stands beside the old card when the kill comes, then its checkpoint breaks: step 2 is all that is
    left, and the adapter is not its."""
    kill(lab.command("another", "lora"), "README.md", 2)
    folder, short = lab.run("another"), lab.train("short", "lora", "max_train_steps=2")
    os.truncate(folder / "checkpoints" / "step-00000004" / "model.safetensors", 100)
    assert content(folder / LORA) == content(straight("lora") / LORA)
    lab.train("another", "lora", "max_train_steps=2")
    assert content(folder / LORA) == content(short / LORA)
    lab.train("another", "lora")
    assert result(folder) == result(straight("lora"))


@pytest.mark.parametrize("kind", KINDS)
def test_export_makes_the_result_of_any_checkpoint(lab: Lab, straight: Any, kind: str, tmp_path: Path) -> None:
    folder, expected = straight(kind), result(straight(kind))
    short = result(lab.train(f"short-{kind}", kind, "max_train_steps=2"))
    name = LORA if kind == "lora" else f"{FULL}/diffusion_pytorch_model.safetensors"
    main(["export", str(folder), "--step", "2", "--out", str(tmp_path / "out")])
    assert files(tmp_path / "out")[name] == short[name]
    assert short[name] != expected[name]
    assert result(folder) == expected
    main(["export", str(folder), "--step", "2"])
    assert files(folder)[name] == short[name]
    main(["export", str(folder)])
    assert result(folder) == expected
    main(["export", str(folder), "--out", str(tmp_path / "out")])  # in place of an earlier result
    assert files(tmp_path / "out")[name] == expected[name]


def test_export_of_both_experts(lab: Lab, pipeline_folder: Folder, tmp_path: Path) -> None:
    base = pipeline_folder("wan-a14b")
    settings = ["model_family=wan", f"pretrained_model_name_or_path={base}", "max_train_steps=2", "use_ema=false"]
    folder = lab.train("experts", "lora", *settings, "validation_prompt=null", "tread_config=null")
    main(["export", str(folder), "--out", str(tmp_path / "out")])
    made, names = files(tmp_path / "out"), (LORA, "pytorch_lora_weights_2.safetensors")
    assert [made[name] for name in names] == [content(folder / name) for name in names]
    assert made[LORA] != made[names[1]]


def test_export_needs_no_quantized_base(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = lab.train("int8", "lora", "base_model_precision=int8")
    monkeypatch.setattr("tread.finetune.run.quantize", pytest.fail)
    main(["export", str(folder), "--out", str(tmp_path / "out")])
    assert files(tmp_path / "out")[LORA] == files(folder)[LORA]


@pytest.fixture
def fail(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end with code 2; returns what it says."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
        return capsys.readouterr().err.strip()

    return run


def test_mistakes_with_export_are_said_in_a_sentence(straight: Any, fail: Any, tmp_path: Path) -> None:
    folder = str(straight("lora"))
    nowhere = str(tmp_path / "nowhere")
    assert fail("export", nowhere) == f"tread export: {nowhere!r} is not the folder of a run: it has no config.yaml."
    assert fail("export", folder, "--step", "3") == (
        f"tread export: {folder} has no checkpoint of step 3; there are: 2, 4."
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").touch()
    assert fail("export", folder, "--out", str(tmp_path / "out")) == (
        f"tread export: --out {tmp_path}/out holds something else than a result; name a new or an empty folder."
    )
    with locked(Path(folder, LOCK_FILE)):
        assert fail("export", folder) == (
            f"tread export: another job is training in {folder}: wait for its end, or name another folder with --out."
        )
    (tmp_path / "config.yaml").write_text("model: {depth: 5}")
    assert fail("export", str(tmp_path)) == (
        f"tread export: {tmp_path} is a run of `tread train`, whose checkpoints are its result: draw from it with "
        f"`tread sample {tmp_path}`, or from one checkpoint with `tread sample {tmp_path}/checkpoints/STEP`."
    )
    (tmp_path / "config.yaml").write_text(Path(folder, "config.yaml").read_text())
    assert fail("export", str(tmp_path)) == f"tread export: {tmp_path} has no checkpoint yet; train it first."


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("resume", ["latest", "run"])
def test_a_run_whose_checkpoints_are_all_broken_is_not_begun_anew(lab: Lab, kind: str, resume: str, fail: Any) -> None:
    name = f"broken-{kind}-{resume}"
    folder = lab.train(name, kind)
    for step in (2, 4):
        os.truncate(folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors", 100)
    before = files(folder)
    settings = [f"resume_from_checkpoint={folder}"] if resume == "run" else []
    said = fail(*lab.command(name, kind, *settings))
    assert said.startswith(f"tread finetune: no checkpoint in {folder}/checkpoints is whole; nothing was changed")
    assert "step-00000004 is not whole: model.safetensors has 100 of" in said
    assert "optimizer.safetensors may be whole" in said
    assert files(folder) == before
    said = fail("export", str(folder), "--step", "2")
    assert f"{folder}/checkpoints/step-00000002 is not whole: model.safetensors has 100 of" in said
    assert files(folder) == before
