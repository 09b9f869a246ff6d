"""Reading configs: JSON and YAML, dashes, overrides, files they name, and what each mistake is told."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.tiny.pictures import write_gradients
from tread.config import schema
from tread.errors import ConfigError, TreadWarning
from tread.finetune.config import check, read_config, read_mapping
from tread.training.checkpoint import CHECKPOINTS

BASE = {"model_family": "flux", "pretrained_model_name_or_path": "model", "data": "photos"}


def write(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_json_yaml_and_dashes_are_the_same_config(tmp_path: Path) -> None:
    plain = write(tmp_path, "a.json", {**BASE, "learning_rate": 5e-5, "use_ema": True})
    dashed = {f"--{key}": value for key, value in BASE.items()}
    flat = write(tmp_path, "b.json", {**dashed, "--learning_rate": "5e-5", "--use_ema": "true"})
    yaml = write(
        tmp_path,
        "c.yaml",
        "model_family: flux\npretrained_model_name_or_path: model\ndata: photos\nlearning_rate: 5e-5\nuse_ema: yes\n",
    )
    assert read_config(plain) == read_config(flat) == read_config(yaml)
    assert read_config(plain).learning_rate == 5e-5


def test_overrides_replace_the_file_s(tmp_path: Path) -> None:
    path = write(tmp_path, "c.json", {**BASE, "lora_rank": 8, "validation_prompt": "a cat", "tread_config": "lora"})
    config = read_config(
        path,
        [
            "lora_rank=32",
            "--learning_rate=1e-5",
            "validation_prompt=a sign: 42, {no} mapping",
            'lora_targets=["to_q", "to_k"]',
            "tread_config=null",
            "compile=false",
            "max_train_steps = 7",
        ],
    )
    assert (config.lora_rank, config.learning_rate, config.max_train_steps) == (32, 1e-5, 7)
    assert config.validation_prompt == "a sign: 42, {no} mapping"
    assert config.lora_targets == ("to_q", "to_k")
    assert config.tread_config is None
    assert config.compile is False


def test_the_config_of_a_moved_run_goes_on_where_it_lies(tmp_path: Path) -> None:
    """Its output_dir is the old folder, which is gone; a new run would begin there."""
    (tmp_path / "run" / CHECKPOINTS / "step-00000002").mkdir(parents=True)
    path = write(tmp_path / "run", "config.yaml", {**BASE, "output_dir": str(tmp_path / "before")})
    assert read_config(path).output_dir == f"{tmp_path}/before", "it is not resumed"
    sentence = f"output_dir '{tmp_path}/before' has no checkpoints, so the run goes on beside the config, in "
    with pytest.warns(TreadWarning, match=re.escape(f"{sentence}{path.parent};")):
        assert read_config(path, ["resume_from_checkpoint=latest"]).output_dir == str(path.parent)
    new = f"{tmp_path}/new"
    assert read_config(path, ["resume_from_checkpoint=latest", f"output_dir={new}"]).output_dir == new


def test_files_that_a_config_names_are_read_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    write(tmp_path, "entries.json", [{"id": "more", "type": "local", "instance_data_dir": "more"}])
    write(tmp_path, "prompts.json", {"cat": "a cat", "dog": "a dog"})
    write(tmp_path, "routes.yaml", "tread_config:\n  preset: paper\n  schedule: null\n")
    path = write(
        tmp_path / "configs",
        "c.json",
        {
            **BASE,
            "data_backend_config": "entries.json",
            "user_prompt_library": "prompts.json",
            "tread_config": "routes.yaml",
            "validation_prompt": "a sign",
        },
    )
    config = read_config(path)
    assert [entry["instance_data_dir"] for entry in config.data_entries()] == ["photos", "more"]
    assert config.prompts == ("a sign", "a cat", "a dog")
    plan = config.plan()
    assert plan is not None
    assert plan.schedule is None
    assert plan.routes[0].selection_ratio == 0.5


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("prompts.txt", "a cat\n\n  a [trigger] dog \n"),
        ("prompts.json", ["a cat", "a [trigger] dog"]),
        ("prompts.yaml", "first: a cat\nsecond: a [trigger] dog\n"),
    ],
)
def test_prompts_may_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, name, content)
    config = read_config(write(tmp_path, "c.json", {**BASE, "validation_prompt": name, "trigger_word": "blue"}))
    assert config.validation_prompt == ("a cat", "a [trigger] dog"), "the config that a run keeps is whole"
    assert config.prompts == ("a cat", "a blue dog")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "validation_prompt names 'none.txt', which does not exist; write a prompt or a file."),
        ("p.txt", "\n \n", "validation_prompt names 'p.txt', which has no prompts; write one in each line."),
        ("p.json", [1, 2], "validation_prompt names 'p.json', which holds no list or mapping of prompts."),
        ("p.json", "[", "is not valid JSON"),
    ],
)
def test_a_file_without_prompts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        write(tmp_path, name, content)
    with pytest.raises(ConfigError) as error:
        read_config(write(tmp_path, "c.json", {**BASE, "validation_prompt": name}))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.json", '{"seed": 1,\n "data": }', "'c.json' is not valid JSON at line 2, column 10: Expecting value."),
        ("c.yaml", "seed: 1\n  data: [", "'c.yaml' is not valid YAML at line 2, column 7: mapping values are not"),
        (
            "c.json",
            "[{}]",
            "c.json is a list; a config is a mapping of settings. It looks like a data list: name it in a config as "
            "data_backend_config.",
        ),
        ("c.yaml", "", "c.yaml is empty; a config is a mapping of settings."),
        ("c.json", '{"--seed": 1, "seed": 2}', "c.json has seed twice, with and without dashes; keep one."),
    ],
)
def test_what_cannot_be_read(
    name: str,
    content: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, name, content)
    with pytest.raises(ConfigError) as error:
        read_mapping(name)
    assert message in str(error.value)
    assert check(name) == 2
    assert capsys.readouterr().err == f"{error.value}\n"
    assert check(name, as_json=True) == 2
    assert json.loads(capsys.readouterr().out) == {"runs": False, "error": str(error.value)}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("data_backend_config", "data_backend_config names 'no.json', which does not exist ("),
        ("tread_config", "tread_config is 'no.json': no preset (balanced, "),
    ],
)
def test_a_file_that_a_config_names_is_missing(
    key: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "c.json", {key: "no.json"})
    with pytest.raises(ConfigError) as error:
        read_mapping(path)
    assert message in str(error.value)
    assert check(path) == 1
    assert message in capsys.readouterr().out


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        read_config("c.json")
    assert str(error.value) == (
        f"the config file 'c.json' does not exist (paths are relative to the working directory, {tmp_path})."
    )


def test_a_setting_in_place_of_the_file_is_called_one() -> None:
    with pytest.raises(ConfigError, match="'model_family=flux' is a setting, not a config file: name the file first"):
        read_config("model_family=flux")


@pytest.mark.parametrize("text", ["lora_rank", "=3", "--check"])
def test_an_override_without_a_value(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: write name=value"):
        read_config(write(tmp_path, "c.json", BASE), [text])


def test_unsupported_keys_keep_it_from_running(tmp_path: Path) -> None:
    one = write(tmp_path, "one.json", {**BASE, "lorarank": 8})
    with pytest.raises(ConfigError) as error:
        read_config(one)
    assert str(error.value) == "lorarank is 8: unknown key. Did you mean 'lora_rank'?"
    two = write(tmp_path, "two.json", {**BASE, "fsdp_enable": True, "lora_rank": "many"})
    with pytest.raises(ConfigError) as error:
        read_config(two)
    first, *rest = str(error.value).splitlines()
    assert first == f"{two} has 2 settings that do not run:"
    assert rest[0].startswith("  fsdp_enable is true: quantize the base instead (base_model_precision: int8")
    assert rest[1] == "  lora_rank is 'many'; it must be a whole number."


def test_ignored_keys_are_said_once(tmp_path: Path) -> None:
    path = write(tmp_path, "c.json", {**BASE, "hub_model_id": "me/mine", "disable_benchmark": True})
    with pytest.warns(UserWarning, match="ignored, as nothing depends on it") as told:
        read_config(path)
    (warning,) = told
    assert str(warning.message).endswith(": hub_model_id, disable_benchmark (`tread finetune --check` says why).")


def test_the_config_that_a_run_keeps_is_read_without_a_word(tmp_path: Path) -> None:
    kept = schema.plain(read_config(write(tmp_path, "c.json", BASE)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert schema.plain(read_config(write(tmp_path, "kept.json", kept))) == kept


def test_check_prints_a_table_and_tells_by_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"data": str(write_gradients(tmp_path / "photos", masked=False)), "optimizer": "optimi-lion"}
    path = write(tmp_path, "c.json", {**BASE, **given, "push_checkpoints_to_hub": True, "num_processes": 8})
    assert check(path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "not supported: change these (1)"
    assert lines[1].split() == [
        *("push_checkpoints_to_hub", "true:", "leave", "it", "out,", "and", "upload", "checkpoints", "with"),
        *("`hf", "upload`"),
    ]
    assert 'optimizer                      "optimi-lion": optimizer: lion' in lines[3]
    assert lines[-1] == "it does not run: 1 to change"

    assert check(path, as_json=True, overrides=["push_checkpoints_to_hub=false"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["runs"] is True
    assert {"key": "optimizer", "value": "optimi-lion", "verdict": "translated", "text": "optimizer: lion"} in report[
        "keys"
    ]
    assert {entry["key"] for entry in report["keys"]} == {
        *BASE,
        "optimizer",
        "push_checkpoints_to_hub",
        "num_processes",
    }
