"""Sharded fine-tunes on two processes: the losses and the result of one process, from LoRA to all weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.finetune.model.layouts import START
from tests.finetune.model.layouts import main as train_in_turn
from tests.finetune.tasks import ROUTES
from tests.forks import in_ranks
from tests.tiny.pictures import write_noise
from tests.tiny.runs import forget, metrics
from tread.cli import main
from tread.errors import ConfigError
from tread.finetune.config import read_config
from tread.finetune.experts import joined
from tread.finetune.preflight import open_model
from tread.finetune.run import finetune, load_models
from tread.training.checkpoint import list_checkpoints
from tread.training.parts import load_part

pytestmark = pytest.mark.filterwarnings("ignore")
FLUX: dict[str, Any] = {"model_family": "flux", "tokenizer_max_length": 32}
RUNS: dict[str, dict[str, Any]] = {
    "full": {**FLUX, "model_type": "full", "parallel": "fsdp", "use_ema": True, "learning_rate": 1e-3},
    "dora": {
        **FLUX,
        "parallel": "hsdp",
        "shard_size": 2,
        "learning_rate": 0.02,
        "validation_prompt": "a cat",
        "use_dora": True,
    },
    "scratch": {
        "model_family": "wan",
        "init": "scratch",
        "transformer": {"num_layers": 3},
        "parallel": "fsdp",
        "learning_rate": 1e-3,
    },
    "int8": {**FLUX, "parallel": "fsdp", "base_model_precision": "int8", "learning_rate": 0.02},
    "bf16": {**FLUX, "parallel": "fsdp", "base_model_precision": "bf16", "mixed_precision": "bf16"},
    "lokr": {**FLUX, "parallel": "fsdp", "lora_type": "lokr", "cpu_offload": True, "learning_rate": 0.02},
    "wan": {"model_family": "wan", "model_type": "full", "parallel": "fsdp", "gradient_accumulation_steps": 2},
}
"""Layouts that two processes run."""
BASES = {"flux": "flux", "wan": "wan-a14b"}
"""The tiny pipeline of each family; that of Wan has two experts."""
ALONE = {"parallel": "ddp", "shard_size": None, "cpu_offload": False, "train_batch_size": 2}
"""Changes to a layout for one process."""
TWICE = ("bf16",)
"""Those that are run again with the model whole on each process before it is sharded."""


def config_of(name: str, folder: Path, base: Path, ending: str = "", **changes: Any) -> Path:
    """The file of a config with its run in `FOLDER/NAME`, the ending added."""
    keys = {
        "pretrained_model_name_or_path": str(base),
        "data": {"instance_data_dir": str(folder / "data"), "resolution": 64},
        "cache_dir": str(folder / "cache"),
        "output_dir": str(folder / f"{name}{ending}"),
        "max_train_steps": 2,
        "train_batch_size": 1,
        "checkpoint_step_interval": 1,
        "eval_steps_interval": 1,
        "num_eval_images": 3,
        "validation_steps": 2,
        "validation_num_inference_steps": 1,
        "caption_dropout_probability": 0.3,
        "mixed_precision": "no",
        "report_to": "none",
        "tread_config": ROUTES,
    }
    path = folder / f"{name}{ending}.json"
    path.write_text(json.dumps(keys | RUNS[name] | changes))
    return path


@pytest.fixture(scope="module")
def two(pipeline_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of two processes with one sample each per forward."""
    folder = tmp_path_factory.mktemp("two")
    write_noise(folder / "data", [(64, 64)] * 8)
    configs = [config_of(name, folder, pipeline_folder(BASES[RUNS[name]["model_family"]])) for name in RUNS]
    configs += [config_of(name, folder, pipeline_folder("flux"), "-whole") for name in TWICE]
    in_ranks(train_in_turn, *configs)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_as_one(
    name: str, two: Path, pipeline_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process with both samples in a forward: losses to rounding, and the files of the result."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    forget()
    (tmp_path / "data").symlink_to(two / "data")
    finetune(read_config(config_of(name, tmp_path, pipeline_folder(BASES[RUNS[name]["model_family"]]), **ALONE)))
    forget()
    rounding = 3e-2 if name == "bf16" else 1e-4
    for line, other in zip(metrics(tmp_path / name), metrics(two / name), strict=True):
        assert other == pytest.approx(line, rel=rounding)
    one, other = result(tmp_path / name), result(two / name)
    assert one.keys() == other.keys()
    if name != "bf16":
        for key, tensor in one.items():
            torch.testing.assert_close(other[key], tensor, rtol=1e-3, atol=2e-3 if "lora" in key else 1e-4)


def result(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a run's result, by file and name."""
    listed = json.loads((folder / "result.json").read_text())["files"]
    files = [name for name in listed if name.endswith(".safetensors")]
    return {f"{file}: {name}": tensor for file in files for name, tensor in load_file(folder / file).items()}


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_begin_as_one(
    name: str, two: Path, pipeline_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """The weights of the shards, read or drawn, are bit for bit those of a process that has them whole."""
    config = read_config(config_of(name, tmp_path, pipeline_folder(BASES[RUNS[name]["model_family"]]), **ALONE))
    expected = joined(load_models(config, open_model(config), torch.device("cpu")))
    found = load_file(two / name / START)
    assert found.keys() == dict(expected.named_parameters()).keys()
    for key, tensor in expected.named_parameters():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", TWICE)
def test_reading_shards_changes_nothing(two: Path, name: str) -> None:
    """Losses and result of a frozen base that was read in shards are those of one that each process had whole."""
    assert json.loads((two / f"{name}-whole" / "rank-0.json").read_text())["whole"] == ["transformer"]
    assert metrics(two / name) == metrics(two / f"{name}-whole")
    one, other = result(two / name), result(two / f"{name}-whole")
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


@pytest.mark.parametrize("name", ["full", "wan", "bf16", "lokr", "dora", "scratch"])
def test_each_rank_reads_the_weights_that_it_keeps(two: Path, name: str) -> None:
    """No process ever holds the whole transformer: it is made on the meta device, and pieces of its files are read
    or its layers drawn one by one."""
    ranks = [json.loads((two / name / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [rank["whole"] for rank in ranks] == [[], []]
    assert sum(rank["held"] for rank in ranks) == ranks[0]["all"]
    assert max(rank["held"] for rank in ranks) < 0.6 * ranks[0]["all"]


def test_the_result_is_the_average_in_the_shards(two: Path) -> None:
    averaged = load_part(list_checkpoints(two / "full" / "checkpoints")[-1], "ema")
    written = result(two / "full")
    assert len(averaged) == len(written)
    for name, tensor in written.items():
        assert torch.equal(averaged[name.partition(": ")[2]], tensor)


def test_export_makes_one_file_of_the_shards(two: Path, tmp_path: Path) -> None:
    main(["export", str(two / "full"), "--step", "1", "--out", str(tmp_path / "out")])
    averaged = load_part(two / "full" / "checkpoints" / "step-00000001", "ema")
    written = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert averaged.keys() == written.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in averaged.items())


def test_previews_are_drawn_once(two: Path) -> None:
    assert [path.name for path in (two / "dora" / "previews").iterdir()] == ["step-00000002-0.png"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adamw-8bit"}, "optimizer is 'adamw-8bit', which keeps its moments in blocks of 256 values"),
        ({"optimizer": "muon"}, "optimizer is 'muon', which steps along whole matrices"),
        ({"optimizer": "prodigy", "learning_rate": 1.0}, "optimizer is 'prodigy', which estimates its rate from all"),
        ({"optimizer": "adamw-schedule-free"}, "optimizer is 'adamw-schedule-free', which swaps the storage"),
        ({"optimizer": "adafactor"}, "optimizer is 'adafactor', which needs whole rows and columns of a weight"),
        ({"graphs": True}, "graphs is true, but a CUDA graph cannot gather the weights of parallel 'fsdp'"),
        ({"shard_size": 2}, "shard_size is 2, but parallel is 'fsdp', where all processes share one copy"),
        ({"parallel": "hsdp", "shard_size": 3}, "shard_size is 3, which does not divide the 1 processes of this run"),
        ({"parallel": "ddp", "cpu_offload": True}, "cpu_offload is true, but parallel is 'ddp'"),
        ({"parallel": "ddp", "shard_size": 2}, "shard_size is 2, but parallel is 'ddp'"),
        ({"model_type": "lora", "base_model_precision": "nf4"}, "whose packed weights torch cannot shard"),
        (
            {"model_type": "lora", "lora_type": "lycoris", "lycoris_config": {"algo": "lora"}},
            "lora_type is 'lycoris', whose network reads weights outside of the layer",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(
    changes: dict[str, Any],
    message: str,
    pipeline_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    forget()
    write_noise(tmp_path / "data", [(64, 64)] * 4)
    path = config_of("full", tmp_path, pipeline_folder("flux"), use_ema=False, **changes)
    with pytest.raises(ConfigError, match=message):
        finetune(read_config(path))
