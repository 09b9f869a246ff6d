"""A run on shards of a server, a window at a time, is the run on the same files, and a resume of it goes on."""

from pathlib import Path

import pytest

from tests.data.server import serving
from tests.tiny.runs import final_state, go_on, metrics, train, write_shards


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return write_shards(tmp_path / "s", 6, 8)


def test_a_run_on_a_server_is_the_run_on_its_files(tmp_path: Path, shards: Path) -> None:
    size = (shards / "s-0.tar").stat().st_size
    settings = ["data=latents", "data.num_classes=3", "validation.samples=6", "validation.every=4", "train.workers=1"]
    straight = train(tmp_path / "straight", *settings, f"data.path={shards}", "data.window=1", "train.steps=8")
    with serving(shards) as server:
        remote = [f"data.path={server.url}/s-{{0..5}}.tar", "data.window=1", f"data.cache={tmp_path / 'c'}"]
        remote += [f"data.cache_gb={2 * size / 1e9:.9f}"]
        folder = train(tmp_path / "run", *settings, *remote, "train.steps=3", "validation.every=0")
        go_on(folder, "train.steps=8", "validation.every=4")
    held = sum(path.stat().st_size for path in (tmp_path / "c").glob("*.tar"))
    assert 0 < held <= 2 * size
    one, two = metrics(straight), metrics(folder)
    assert [line["step"] for line in one] == [line["step"] for line in two]
    assert one[-1] == two[-1]
    for part, tensors in final_state(straight).items():
        for name, tensor in tensors.items():
            assert tensor.equal(final_state(folder)[part][name]), name
