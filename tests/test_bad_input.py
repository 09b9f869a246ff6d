"""Bad input of every kind ends in one of our errors, soon, in at most 500 characters and without secrets."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tread.config.documents import parse_json, parse_yaml, read_document
from tread.data.captioned.entries import DataConfig
from tread.data.captioned.samples import collect
from tread.data.images import read_image
from tread.data.index import index_shards
from tread.data.latents import Latents
from tread.errors import LONGEST, CheckpointError, ConfigError, DataError, masked, shown
from tread.evaluate.features import find_weights, weights_folder
from tread.evaluate.images import open_images
from tread.evaluate.statistics import Tally, read_statistics
from tread.finetune.compat.translate import translate
from tread.finetune.config import check, read_config
from tread.finetune.data.cache import Cache
from tread.finetune.model.source import Source
from tread.pretrain.config import compose, from_run
from tread.routing.plan import RoutePlan
from tread.training.metrics import read_metrics
from tread.training.parts import load_optimizer

BASE = {"model_family": "flux", "pretrained_model_name_or_path": "model", "data": "photos"}
OURS = (ConfigError, DataError, CheckpointError)


def written(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


@pytest.mark.parametrize(
    "value", [["x"], {"a": 1}, [], {}, 10**400, "9" * 5000, "\ud800", "a" * 20000, "b/" * 5000, 0.5]
)
@pytest.mark.parametrize(
    "key",
    ["model_family", "optimizer", "base_model_precision", "lr_scheduler", "attention_mechanism", "tread_config", "data",
     "max_train_steps", "learning_rate", "validation_prompt", "data_backend_config"],
)  # fmt: skip
def test_any_value_of_a_finetune_key_is_judged(key: str, value: object, tmp_path: Path) -> None:
    library = {"user_prompt_library": {"a": "b"}, "lora_type": "lycoris"}
    path = written(tmp_path / "c.json", {**BASE, **library, key: value})
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert len(str(error.value)) <= LONGEST
    str(error.value).encode()


@pytest.mark.parametrize("rank", ["x", [8], {}, 0.5, True])
def test_any_rank_of_lycoris_is_judged(rank: object, tmp_path: Path) -> None:
    given = {"lora_type": "lycoris", "lycoris_config": {"algo": "lokr", "linear_dim": rank}}
    with pytest.raises(ConfigError, match=r"lycoris_config\.linear_dim is .*; it must be a whole number"):
        read_config(written(tmp_path / "c.json", {**BASE, **given}))


def test_a_train_config_is_named_as_such(tmp_path: Path) -> None:
    path = written(tmp_path / "c.json", {"model": {"name": "dit"}, "data": {"name": "digits"}, "train": {"steps": 5}})
    with pytest.raises(ConfigError, match="is a config of `tread train`"):
        read_config(path)


def test_a_finetune_config_is_named_as_such(tmp_path: Path) -> None:
    path = written(tmp_path / "c.json", {"--model_family": "flux"})
    with pytest.raises(ConfigError, match="is a config of `tread finetune`: run `tread finetune "):
        compose([str(path)])


@pytest.mark.parametrize(
    "setting",
    ["seed=" + "9" * 5000, "output_dir=\udc80", "resume=" + "a" * 5000, "train.steps=0x" + "f" * 5000, "x" * 9999],
)
def test_any_value_of_a_train_setting_is_judged(setting: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose([setting])
    assert len(str(error.value)) <= LONGEST


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [*a]",
        "a: &a {b: *a}",
        "a: !!timestamp 2020-99-99",
        "a: !!timestamp x",
        "a: !!binary aGk=",
        "a: !!set {a, b}",
        "a: !!python/name:os.system",
        'a: "\\UFFFFFFFF"',
        'a: "\\uD800"',
        "[" * 5000,
        "a: {b: " * 60,
    ],
)
def test_yaml_that_is_no_plain_tree_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_yaml(text)


@pytest.mark.parametrize("line", ["{0}: &{0} [{1}]", "{0}: &{0} {{<<: [{1}]}}"])
def test_yaml_that_grows_without_end_is_refused(line: str) -> None:
    lines = ["a: &a {x: 1}"]
    for name, below in zip("bcdefghij", "abcdefghi", strict=True):
        lines.append(line.format(name, ", ".join([f"*{below}"] * 20)))
    with pytest.raises(ConfigError, match="grows to more than"):
        parse_yaml("\n".join(lines))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100, '"\\ud800"', '"\\u0000"', " " * 2**21])
def test_json_that_is_no_plain_tree_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_json(text)


def test_an_integer_of_many_digits_is_no_integer() -> None:
    assert parse_json("9" * 5000) == float("inf")
    assert shown(10**400) == "a number of 401 digits"


def test_text_that_is_not_utf8_is_refused_or_left_out(tmp_path: Path) -> None:
    for name in ("c.yaml", "c.json", "config.yaml"):
        written(tmp_path / name, b"seed: \xff\xfe")
        with pytest.raises(ConfigError, match="is not text"):
            read_document(tmp_path / name)
    with pytest.raises(ConfigError, match="is not text"):
        from_run(tmp_path)
    written(tmp_path / "metrics.jsonl", b'{"step": 1}\n\xff\xfe\n[]\n{"step": "x"}\n5\n{"step": 2}\n')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize(
    "config", [{"routes": [[]]}, {"preset": ["paper"]}, {"seed": 10**5000}, "a" * 5000, {"importance": 10**400}]
)
def test_any_plan_is_judged(config: Any) -> None:
    with pytest.raises(ConfigError) as error:
        RoutePlan.from_config(config if isinstance(config, str) else {"preset": "paper", "selector": "l1", **config})
    assert len(str(error.value)) <= LONGEST


@pytest.mark.parametrize("stored", [[1], {"a": 1}, {"a": [1, 2]}, {"a": [[], {}, None]}, 5, None])
def test_odd_hashes_in_the_cache_are_made_again(stored: object, tmp_path: Path) -> None:
    picture = written(tmp_path / "a.png", b"x")
    written(tmp_path / "cache" / "hashes-0.json", stored)
    assert len(Cache(tmp_path / "cache").hashes.of([picture], progress=False)) == 1


@pytest.mark.parametrize("names", [["0.exp_avg"], ["step"], ["x.y"], ["0"]])
def test_an_odd_optimizer_file_is_refused(names: list[str]) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(CheckpointError, match="the optimizer's state does not belong to this run"):
        load_optimizer(optimizer, {name: torch.ones(2) for name in names}, Path("run"))


def test_an_npz_in_the_place_of_an_npy_is_refused(tmp_path: Path) -> None:
    from fuzz.files import npz, tar

    shard = written(tmp_path / "a.tar", tar(npz(a=np.zeros((4, 2, 2)))))
    with pytest.raises(DataError, match=r"latent\.npy of sample a in .* is not a readable array"):
        Latents(shard)


@pytest.mark.parametrize(
    "odd",
    [{"count": np.zeros(3)}, {"count": np.array("x")}, {"mu": np.array(["a", "b"])}, {"sigma": np.eye(2) * 1j}],
    ids=str,
)
def test_odd_statistics_are_refused(odd: dict[str, np.ndarray], tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{"mu": np.zeros(2), "sigma": np.eye(2), **odd})
    with pytest.raises(DataError):
        read_statistics(tmp_path / "a.npz")


@pytest.mark.parametrize("odd", ["total", "pool.mean", "pool.scatter", "vectors", "score.sums"])
@pytest.mark.parametrize("value", [None, np.zeros((2, 2, 2)), np.array("x")], ids=["absent", "3-d", "text"])
def test_an_odd_tally_is_refused(odd: str, value: np.ndarray | None, tmp_path: Path) -> None:
    from fuzz.files import tally_file

    path = written(tmp_path / "a.npz", tally_file())
    with np.load(path) as file:
        arrays: dict[str, Any] = {**file, odd: value}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    if odd in ("pool.mean", "vectors") and value is None:  # nothing was measured, or nothing kept
        return
    with pytest.raises(DataError):
        Tally.load(path)


@pytest.fixture
def copied(pipeline_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(pipeline_folder("flux"), tmp_path / "model")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04.", b"\x80\x02}q\x00.", b"PK\x03\x04"], ids=["empty", "cut", "pickle", "zip"]
)
def test_a_pickled_or_cut_text_encoder_is_refused(copied: Path, content: bytes) -> None:
    for file in (copied / "text_encoder").glob("*.safetensors"):
        file.unlink()
    written(copied / "text_encoder" / "pytorch_model.bin", content)
    with pytest.raises(ConfigError) as error:
        Source(str(copied)).check("text_encoder")
    assert len(str(error.value)) <= LONGEST


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": 5}', b"\xff"])
def test_a_damaged_tokenizer_is_refused(copied: Path, content: bytes) -> None:
    for file in (copied / "tokenizer").iterdir():
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot load tokenizer"):
        Source(str(copied)).pipeline("tokenizer")


@pytest.mark.parametrize(
    "change",
    [{"_class_name": []}, {"_class_name": None}, {"_class_name": "NoPipeline"}, {"tokenizer": []}, {"vae": ["x"]}],
)
def test_an_odd_model_index_is_refused(copied: Path, change: dict[str, Any]) -> None:
    index = json.loads((copied / "model_index.json").read_text())
    written(copied / "model_index.json", {**index, **change})
    with pytest.raises(ConfigError):
        Source(str(copied)).pipeline("tokenizer", "vae")
    for whole in ([], "x", None):
        with pytest.raises(ConfigError, match="no model at"):
            Source(str(written(copied / "model_index.json", whole).parent))


def captioned(path: Path) -> None:
    collect([DataConfig(instance_data_dir=str(path.parent))], video=False)


@pytest.mark.parametrize("read", [partial(read_image, size=8), index_shards, open_images, captioned])
@pytest.mark.parametrize("name", ["a.png", "a.tar", "a.npz"])
def test_a_pipe_is_no_file(read: Callable[[Path], object], name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "a.txt").write_text("a cat")
    with pytest.raises(OURS):
        read(tmp_path / name)


def test_a_pipe_among_images_is_left_out_or_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("a cat")
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    found = collect([DataConfig(instance_data_dir=str(tmp_path))], video=False, progress=False)
    assert [Path(name).name for name, _ in found.skipped] == ["b.png"]
    with pytest.raises(DataError, match="no regular file"):
        open_images(tmp_path).read(0, 2)


def test_a_caption_of_five_megabytes_is_left_out(tmp_path: Path) -> None:
    for name, caption in (("a", "a cat"), ("b", "word " * 1_000_000)):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(caption)
    found = collect([DataConfig(instance_data_dir=str(tmp_path))], video=False, progress=False)
    assert [sample.captions for sample in found.samples] == [("a cat",)]
    assert "at most 50000 are read" in found.skipped[0].reason
    with pytest.raises(ConfigError, match="at most 50000 characters"):
        DataConfig(instance_data_dir="x", instance_prompt="word " * 100_000)


def test_secrets_are_never_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"instance_data_dir": "photos", "aws_secret_access_key": "hidden!", "nested": {"hub_token": "hidden!"}}
    path = written(tmp_path / "c.json", {**BASE, "data": [entry], "wandb_api_key": "hidden!", "seed": [entry]})
    for as_json in (False, True):
        assert check(path, as_json) == 1
    with pytest.raises(ConfigError) as error:
        read_config(path)
    backends = written(tmp_path / "d.json", {**BASE, "data_backend_config": entry})
    with pytest.raises(ConfigError) as other:
        read_config(backends)
    out = capsys.readouterr()
    assert "aws_secret_access_key" in out.out
    assert "hidden!" not in f"{out.out}{out.err}{error.value}{other.value}"
    assert masked([{"password": "x", "id": 1}]) == [{"password": "********", "id": 1}]
    assert "hidden!" not in str(translate({**BASE, "data": [entry]}).verdicts)


@pytest.fixture
def served(tmp_path: Path) -> Any:
    """A folder, and the URL of a server of its files."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_only_weights_that_can_be_read_stay_in_the_cache(
    served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, url = served
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    written(folder / "bad.pth", b"<html>no such page</html>")
    save_file({"a": torch.ones(2)}, folder / "good.safetensors")
    local = f"file://{folder}/good.safetensors"
    for bad in (local, f"{url}/bad.pth", f"{url}/absent.pth", f"{url}/", "ftp://x/a.pth", "https://"):
        with pytest.raises(ConfigError):
            find_weights(bad, "x.pth", "x")
        assert not list(weights_folder().glob("*")), bad
    for _ in range(2):  # the second time from the cache
        assert find_weights(f"{url}/good.safetensors?x=1", "x.pth", "x") == weights_folder() / "good.safetensors"
        (folder / "good.safetensors").unlink(missing_ok=True)
