"""A resume refuses settings that change what the weights of the run mean, and leaves the run as it was."""

import re
from pathlib import Path

import pytest

from tests.tiny.runs import forget, go_on, train, write_latents
from tread.autotune.jobs.pretraining import PretrainTuning
from tread.errors import ConfigError
from tread.pretrain.config import compose, from_run
from tread.training.checkpoint import CHECKPOINTS, list_checkpoints

FIX = "set it back, or begin a run in another output_dir, without resume."


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EDM run of one step on latents."""
    folder = tmp_path_factory.mktemp("resumed")
    data = ["data=latents", f"data.path={write_latents(folder / 'shard-000.tar')}", "data.num_classes=3"]
    return train(folder / "run", *data, "objective=edm", "train.steps=1", "checkpoint.every=1")


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (["objective=flow"], "objective.name is 'flow', but the weights in {run} were trained with 'edm'"),
        (["objective.sigma_data=1"], "objective.sigma_data is 1.0, but the weights in {run} were trained with 0.5"),
        (["data.vae=sdxl"], "data.vae is 'sdxl', but the weights in {run} were trained with 'sd'"),
        (["data.scaled=true"], "data.scaled is True, but the weights in {run} were trained with False"),
        (["model.heads=4"], "model.heads is 4, but the weights in {run} were trained with 2"),
        (["model.rope=true"], "model.rope is True, but the weights in {run} were trained with False"),
        (["model.size=S/2"], "model.size is 'S/2', but the weights in {run} were trained with 'tiny'"),
    ],
)
def test_what_the_weights_mean_cannot_change(run: Path, changes: list[str], refusal: str) -> None:
    before = (run / "config.yaml").read_bytes()
    for fork in ([], [f"output_dir={run.parent / 'fork'}"]):
        with pytest.raises(ConfigError) as error:
            go_on(run, "train.steps=2", *changes, *fork)
        assert str(error.value) == f"{refusal.format(run=run)}: {FIX}"
    assert (run / "config.yaml").read_bytes() == before
    assert not (run.parent / "fork").exists()


def test_a_tuning_of_a_resumed_run_refuses_them_too(run: Path, tmp_path: Path) -> None:
    forget()
    with pytest.raises(ConfigError, match=re.escape("objective.name is 'flow'")):
        PretrainTuning(compose([f"resume={run}", "objective=flow"])).open(tmp_path, (0.5,))


def test_how_it_is_trained_and_drawn_may_change(tmp_path: Path) -> None:
    """The times, the solver, the routes, and the same network in other words."""
    run = train(tmp_path / "run", "objective=edm", "train.steps=1", "checkpoint.every=1")
    go_on(run, "train.steps=2", "objective.p_mean=-1", "objective.rho=5", "model=dit", "model.rope=false",
          "model.depth=5", "model.width=16", "model.heads=2", "sample.steps=3")  # fmt: skip
    assert [path.name for path in list_checkpoints(run / CHECKPOINTS)] == ["step-00000001", "step-00000002"]
    assert from_run(run).model.tread_config is None


def test_a_run_without_a_checkpoint_has_nothing_to_keep(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "train.steps=1", "checkpoint.every=0")
    go_on(run, "objective=edm", "train.steps=1")
    assert from_run(run).objective["name"] == "edm"
