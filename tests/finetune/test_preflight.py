"""What a run would refuse, `--check` knows; and a run refuses it before anything is encoded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest

from tests.finetune.trained import changed
from tests.programs import finished
from tests.tiny.pictures import write_gradients
from tests.tiny.runs import forget
from tread.errors import ConfigError, DataError
from tread.finetune.config import check, read_config
from tread.finetune.families import TUNE_FAMILIES, UNTUNED, family_class, open_family
from tread.finetune.model.source import Source
from tread.finetune.run import finetune

pytestmark = pytest.mark.filterwarnings("ignore")
Folder = Callable[[str], Path]


def settings(folder: Path, base: Path, **changes: Any) -> dict[str, Any]:
    """A config of two steps, in `folder`."""
    data = folder / "data"
    if not data.exists():
        write_gradients(data, masked=False)
    usual = {
        "model_family": "flux",
        "pretrained_model_name_or_path": str(base),
        "data": {"instance_data_dir": str(data), "resolution": 64},
        "output_dir": str(folder / "run"),
        "cache_dir": str(folder / "cache"),
        "tokenizer_max_length": 32,
        "max_train_steps": 1,
        "mixed_precision": "no",
        "report_to": "none",
    }
    return usual | changes


def written(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def refused(folder: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The problems that `--check` names; a run raises one of them and encodes nothing."""
    path = written(folder, config)
    capsys.readouterr()
    assert check(path, as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["runs"] is False
    forget()
    before = encoded(folder)
    with pytest.raises((ConfigError, DataError)) as error:
        finetune(read_config(path))
    assert str(error.value) in report["problems"]
    assert encoded(folder) == before
    return report["problems"]


def encoded(folder: Path) -> set[Path]:
    return {path for path in (folder / "cache").rglob("*") if path.is_file() and "meta" not in path.name}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("pixart_sigma", {"model_family": "pixart_sigma", "flow_schedule_shift": 3.0}, "flow_schedule_shift"),
        ("flux", {"lora_targets": ["to_q", "to_z"]}, "lora_targets names 'to_z', which is no linear of Flux"),
        ("flux", {"validation_image": "no.png"}, "validation_image is 'no.png', which does not exist"),
        ("flux", {"data": {"instance_data_dir": "nowhere"}}, "nowhere"),
        ("flux", {"model_family": "sd3"}, "model_family is 'sd3', but "),
        (
            "flux",
            {"tread_config": {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 77}]}},
            "77",
        ),
        ("flux", {"vae_enable_tiling": True}, "vae_enable_tiling is true, but diffusers' AutoencoderTiny tiles"),
        ("flux", {"cpu_offload": True}, "cpu_offload is true, but parallel is 'ddp'"),
        (
            "flux",
            {"output_dir": f"{__file__}/run"},
            f"cannot write to output_dir '{__file__}/run': Not a directory. Name",
        ),
        (
            "flux",
            {"cache_dir": f"{__file__}/cache"},
            f"cache_dir '{__file__}/cache' cannot be created (Not a directory",
        ),
        ("flux", {"resume_from_checkpoint": "nowhere"}, "'nowhere' is not the folder of a run"),
        ("flux", {"init_lora": "./old/lora.safetensors"}, "which is neither a file nor a folder here"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_refusal_is_known_before(
    name: str,
    changes: dict[str, Any],
    message: str,
    pipeline_folder: Folder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (problem,) = refused(tmp_path, settings(tmp_path, pipeline_folder(name), **changes), capsys)
    assert message in problem


def test_data_of_eval_entries_alone(
    pipeline_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(tmp_path, pipeline_folder("flux"))
    config["data"]["dataset_type"] = "eval"
    (problem,) = refused(tmp_path, config, capsys)
    assert problem == "data has only entries of dataset_type eval; add one to train on."


@pytest.mark.parametrize("part", ["transformer", "text_encoder_2", "vae"])
def test_a_part_that_is_cut_off(
    part: str, pipeline_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = shutil.copytree(pipeline_folder("flux"), tmp_path / "base")
    file = max((base / part).glob("*.safetensors"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-100])
    (problem,) = refused(tmp_path, settings(tmp_path, base), capsys)
    assert f"{part} of {base} cannot be loaded" in problem


def test_a_folder_that_holds_another_run(
    pipeline_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(tmp_path, pipeline_folder("flux"))
    forget()
    finetune(read_config(written(tmp_path, config)))
    (problem,) = refused(tmp_path, config, capsys)
    assert problem.startswith(f"{tmp_path / 'run'} already holds a run: continue it with resume_from_checkpoint=latest")
    assert check(written(tmp_path, config | {"resume_from_checkpoint": "latest", "max_train_steps": 2})) == 0


def test_looking_at_folders_makes_none(pipeline_folder: Folder, tmp_path: Path) -> None:
    assert check(written(tmp_path, settings(tmp_path, pipeline_folder("flux")))) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "data"}


def test_other_shapes_on_resume(pipeline_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(tmp_path, pipeline_folder("flux"), lora_rank=4)
    forget()
    finetune(read_config(written(tmp_path, config)))
    again = config | {"resume_from_checkpoint": "latest", "max_train_steps": 2}
    (problem,) = refused(tmp_path, again | {"lora_rank": 8}, capsys)
    assert problem.startswith(f"lora_rank is 8, but the run in {tmp_path / 'run'} trains with 4: set it back")
    (problem,) = refused(tmp_path, again | {"optimizer": "lion"}, capsys)
    assert problem.startswith(
        f"optimizer is 'lion', but the run in {tmp_path / 'run'} trains with 'adamw': set it back"
    )
    (problem,) = refused(tmp_path, again | {"lora_alpha": 8}, capsys)
    assert problem.startswith(f"lora_alpha is 8.0, but the run in {tmp_path / 'run'} trains with 4: set it back")
    assert check(written(tmp_path, again | {"lora_alpha": 4})) == 0


def test_another_base_on_resume(pipeline_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights that were trained on one base mean nothing on another; the same base may have moved."""
    base = pipeline_folder("flux")
    config = settings(tmp_path, base)
    forget()
    finetune(read_config(written(tmp_path, config)))
    again = config | {"resume_from_checkpoint": "latest", "max_train_steps": 2}
    other = shutil.copytree(base, tmp_path / "other")
    (problem,) = refused(tmp_path, again | {"pretrained_model_name_or_path": str(other)}, capsys)
    assert problem.startswith(
        f"pretrained_model_name_or_path is 'other', but the run in {tmp_path / 'run'} trains with {base.name!r}: set"
    )
    moved = other.rename(tmp_path / base.name)
    assert check(written(tmp_path, again | {"pretrained_model_name_or_path": str(moved)})) == 0


def test_all_is_told_at_once(pipeline_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"lora_targets": ["to_z"], "validation_image": "no.png", "data": {"instance_data_dir": "nowhere"}}
    assert len(refused(tmp_path, settings(tmp_path, pipeline_folder("flux"), **changes), capsys)) == 3
    assert check(tmp_path / "config.json") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "refused when the model and the data are opened: change these (3)"
    assert lines[-1] == "it does not run: 3 to change"


def test_a_config_that_runs(pipeline_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, settings(tmp_path, pipeline_folder("flux")))
    assert check(path) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "it runs"
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()


def test_a_model_that_is_not_here_is_not_downloaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(written(tmp_path, settings(tmp_path, Path("someone/something")))) == 0
    said = capsys.readouterr().out
    assert "not looked at (1)\n  the model 'someone/something' is not on this disk: a run downloads it first" in said


def test_a_file_that_is_missing_keeps_no_other_key_from_its_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_family": "flux", "pretrained_model_name_or_path": "model", "data_backend_config": "no.json"}
    routes = [{"selection_ratio": 2, "start_layer_idx": 2, "end_layer_idx": 4}]
    path = written(tmp_path, config | {"lora_rnk": 8, "tread_config": {"routes": routes}, "max_grad_norm": 0.1})
    assert check(path, as_json=True) == 1
    told = {one["key"]: one for one in json.loads(capsys.readouterr().out)["keys"]}
    assert told["max_grad_norm"]["verdict"] == "differs", "it is a config of the existing trainer all the same"
    keys = {key: one for key, one in told.items() if one["verdict"] == "unsupported"}
    assert "no.json" in keys["data_backend_config"]["text"]
    assert "lora_rank" in keys["lora_rnk"]["text"]
    assert [key for key in keys if key.startswith("tread_config")]
    assert len(keys) == 3
    with pytest.raises(ConfigError, match=r"no\.json"):
        read_config(path)


@pytest.mark.parametrize("pipeline", UNTUNED)
def test_a_model_that_is_not_tuned_says_why(pipeline_folder: Folder, tmp_path: Path, pipeline: str) -> None:
    """And where to train it; the pipeline exists, and no family has it."""
    assert hasattr(diffusers, pipeline)
    assert not any(pipeline in family_class(name).pipelines for name in TUNE_FAMILIES)
    place = changed(pipeline_folder("flux"), tmp_path / "m", "model_index.json", _class_name=pipeline)
    words = rf"is a {pipeline}: tread finetune does not tune it \({UNTUNED[pipeline]}\); train it .* with tread.attach"
    with pytest.raises(ConfigError, match=words) as error:
        open_family("flux", Source(str(place)))
    assert len(str(error.value)) < 500


def test_check_shows_no_loading_bars_of_libraries(tmp_path: Path, pipeline_folder: Folder) -> None:
    ended = finished(
        "-m", "tread", "finetune", "--check", written(tmp_path, settings(tmp_path, pipeline_folder("flux")))
    )
    assert ended.returncode == 0, ended.stderr
    assert "Loading weights" not in ended.stderr
