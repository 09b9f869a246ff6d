"""Pretraining: where it starts, what it reads, what it validates on, which settings it refuses."""

import copy
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.tiny.runs import (
    assert_same_run,
    final_state,
    go_on,
    losses,
    make_session,
    metrics,
    train,
    write_images,
    write_latents,
)
from tread.data import Digits
from tread.data.images import ImageFolder
from tread.errors import ConfigError
from tread.objectives import EDM, Flow
from tread.pretrain.config import from_run
from tread.pretrain.task import VALIDATION
from tread.routing.noise import per_sample_normal
from tread.sampling.grid import make_grid


def zero(x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
    return torch.zeros_like(x)


@pytest.mark.parametrize("objective", ["flow", "edm"])
def test_training_starts_at_adaln_zero(tmp_path: Path, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdaLN-Zero is not undone by a later init; the first loss is that of a network that answers 0."""
    task, session = make_session(tmp_path, f"objective={objective}")
    zeroed = [p for name, p in task.model.named_parameters() if ".modulation." in name or name.startswith("final.")]
    assert len(zeroed) == 2 * 5 + 4
    assert not any(parameter.any() for parameter in zeroed)

    first = next(task.batches(0))
    expected = task.loss(zero, first)  # pyright: ignore[reportArgumentType]  (any callable will do)
    torch.testing.assert_close(session.step(0, task.batches(0))["loss"], expected, rtol=1e-6, atol=0)


def test_the_seed_decides_everything_and_nothing_else_does(tmp_path: Path) -> None:
    """Training is seeded, and the setting is not ignored."""
    one = train(tmp_path / "one", "train.steps=3")
    torch.manual_seed(12345)  # what the process did before must not matter
    assert_same_run(one, train(tmp_path / "again", "train.steps=3", "train.seed=0"))
    assert losses(train(tmp_path / "other", "train.steps=3", "train.seed=1")) != losses(one)


def test_another_seed_gives_other_weights_data_noise_and_selections(tmp_path: Path) -> None:
    tasks = [make_session(tmp_path, f"train.seed={seed}")[0] for seed in (0, 1)]
    weights = [task.model.patch_embed.weight for task in tasks]
    assert not torch.equal(weights[0], weights[1])
    batches = [next(task.batches(0)) for task in tasks]
    assert not torch.equal(batches[0][0], batches[1][0])
    selections = []
    for task in tasks:
        task.loss(task.model.train(), batches[0])
        assert task.handle is not None
        selections.append(task.handle.selections[0])
    assert selections[0].shape == (8, 32)
    assert not torch.equal(selections[0], selections[1])
    same = tasks[0].loss(zero, batches[0]), tasks[1].loss(zero, batches[0])  # pyright: ignore
    assert same[0] != same[1]  # the same batch and answer: other noise


def test_the_selections_can_be_seeded_apart(tmp_path: Path) -> None:
    selections = []
    for seed in (1, 2):
        routes = "routes:[{selection_ratio:0.5,start_layer_idx:2,end_layer_idx:3}]"
        task, session = make_session(tmp_path, f"model.tread_config={{{routes},seed:{seed}}}")
        session.step(0, task.batches(0))
        assert task.handle is not None
        selections.append(task.handle.selections[0])
    assert not torch.equal(selections[0], selections[1])


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_class_dropout_replaces_its_share_of_labels_by_the_null_class(tmp_path: Path, share: float) -> None:
    task, _ = make_session(tmp_path, f"train.class_dropout={share}", "sample.guidance=1", "train.batch_size=1024")
    seen: list[Tensor] = []

    def record(x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        seen.append(labels)
        return x

    batch = next(task.batches(0))
    for step in range(2):
        moved = batch._replace(positions=batch.positions + step * len(batch.positions))
        task.loss(record, moved)  # pyright: ignore[reportArgumentType]
    for labels in seen:
        dropped = labels != batch[1]
        assert (labels[dropped] == 10).all()
        assert dropped.float().mean() == pytest.approx(share, abs=0.05)
    assert share == 0 or not torch.equal(seen[0], seen[1])


def test_held_out_data_is_never_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    item = Digits.__getitem__

    def recorded(self: Digits, index: int) -> tuple[Tensor, int]:
        read.append(index)
        return item(self, index)

    monkeypatch.setattr(Digits, "__getitem__", recorded)
    task, _ = make_session(tmp_path, "train.batch_size=137", "train.steps=13", "validation.samples=16")
    for _ in task.batches(0):  # 13 * 137 = 1781 = 1797 - 16: one epoch
        pass
    assert sorted(read) == sorted(set(range(1797)) - set(task.held_out.indices))
    read.clear()
    task.validate()
    assert read == task.held_out.indices
    assert len(read) == 16


def test_the_data_position_is_a_function_of_the_step(tmp_path: Path) -> None:
    """A resumed run does not see the batches of its first steps again."""
    task, _ = make_session(tmp_path, "train.steps=6", "train.micro_steps=2")
    straight = [batch.labels.tolist() for batch in task.batches(0)]
    assert len(straight) == 12
    assert [batch.labels.tolist() for batch in task.batches(4)] == straight[8:]
    assert straight[0] != straight[8]


def randomize(model: nn.Module) -> None:
    """Away from the fresh model, which answers 0 whatever its routes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(("name", "objective"), [("flow", Flow()), ("edm", EDM())])
def test_validation_is_dense_and_on_fixed_noise(tmp_path: Path, name: str, objective: Flow | EDM) -> None:
    """Against the loss computed sample by sample with the routes taken off."""
    task, session = make_session(tmp_path, f"objective={name}")
    randomize(task.model)
    for average, parameter in zip(session.ema.averages.values(), task.model.parameters(), strict=True):  # pyright: ignore[reportOptionalMemberAccess]
        average.copy_(parameter)
        parameter.data.zero_()  # validated are the averages
    with session.averaged():
        found = task.validate()["val_loss"]
        assert task.validate()["val_loss"] == found

    model = copy.deepcopy(task.model)
    with session.averaged():
        model.load_state_dict(task.model.state_dict())
    model.routing = None
    digits, total, quantiles = Digits(), 0.0, []
    for i, index in enumerate(task.held_out.indices):
        x, label = digits[index]
        u = (torch.tensor([i * 11 % 16]) + 0.5) / 16  # 11: the stride coprime to 16
        quantiles.append(float(u))
        noise = per_sample_normal(VALIDATION, torch.tensor([i]), (1, 8, 8))
        with torch.no_grad():
            total += float(objective.loss(model, x[None], torch.tensor([label]), noise=noise, u=u))
    assert found == pytest.approx(total / 16, rel=1e-5)
    assert sorted(quantiles) == [(i + 0.5) / 16 for i in range(16)]


def test_routing_is_on_in_training(tmp_path: Path) -> None:
    """The counterpart: the training loss of the same weights does depend on the routes."""
    task, session = make_session(tmp_path)
    randomize(task.model)
    batch = next(task.batches(0))
    routed = task.loss(session.model.train(), batch)
    task.model.routing = None
    assert float(task.loss(session.model, batch).detach()) != pytest.approx(float(routed.detach()), rel=1e-3)


@pytest.mark.parametrize("settings", [["train.batch_size=3"], ["train.batch_size=64"], ["train.micro_steps=4"]])
def test_validation_does_not_depend_on_the_batch_size(tmp_path: Path, settings: list[str]) -> None:
    found = []
    for case in ([], settings):
        task, _ = make_session(tmp_path, *case)
        randomize(task.model)
        found.append(task.validate()["val_loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize(("count", "held_out", "batch", "epochs"), [(5, 0, 4, 3), (5, 2, 4, 2), (6, 0, 4, 2)])
def test_epochs_visit_every_sample_that_often(
    tmp_path: Path, count: int, held_out: int, batch: int, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two classes of `count` images; every visit of a file is counted, and one step less would miss some of them."""
    data = write_images(tmp_path / "data", "cat", "dog", count=count, size=8)
    visits: Counter[int] = Counter()
    seen: list[int] = []
    read = ImageFolder.__getitem__

    def counted(self: ImageFolder, index: int) -> tuple[Tensor, int]:
        visits[index] += 1
        seen.append(index)
        return read(self, index)

    monkeypatch.setattr(ImageFolder, "__getitem__", counted)
    settings = ["data=images", f"data.path={data}", "data.size=8", f"validation.samples={held_out}"]
    settings += [f"train.batch_size={batch}", f"train.epochs={epochs}"]
    folder = train(tmp_path / "run", *settings)
    trained_on = 2 * count - held_out
    assert len(visits) == trained_on
    assert min(visits.values()) == epochs
    assert max(visits.values()) <= epochs + 1
    assert min(Counter(seen[:-batch])[index] for index in visits) < epochs
    assert len(losses(folder)) * batch == len(seen)
    kept = from_run(folder).train
    assert (kept.steps, kept.epochs) == (len(losses(folder)), None)
    go_on(folder, f"train.epochs={epochs + 2}")
    assert min(visits.values()) == epochs + 2


def test_no_validation_samples_no_validation_lines(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", "train.steps=2", "validation.every=1", "validation.samples=0")
    assert [line["step"] for line in metrics(folder)] == [1, 2]


def test_sample_grids_and_validations_appear_when_due(tmp_path: Path) -> None:
    drawn = ["sample.every=2", "sample.steps=2", "sample.per_class=3", "sample.classes=4"]
    folder = train(tmp_path / "run", "train.steps=5", "validation.every=2", *drawn)
    grids = sorted((folder / "samples").iterdir())
    assert [path.name for path in grids] == ["step-00000002.png", "step-00000004.png", "step-00000005.png"]
    with Image.open(grids[0]) as grid:
        assert grid.size == make_grid(torch.zeros(4 * 3, 8, 8, 1, dtype=torch.uint8), columns=3).size
    assert [line["step"] for line in metrics(folder) if "val_loss" in line] == [2, 4, 5]


def test_an_image_folder_trains_end_to_end_with_its_own_number_of_classes(tmp_path: Path) -> None:
    """The class count is not fixed."""
    images = write_images(tmp_path / "images", "cat", "dog")
    settings = ["data=images", f"data.path={images}", "data.size=8", "model.patch=2", "train.batch_size=4"]
    folder = train(
        tmp_path / "run", *settings, "train.steps=2", "sample.every=2", "sample.steps=2", "validation.every=2"
    )
    assert len(losses(folder)) == 2
    assert final_state(folder)["model"]["label_embed.weight"].shape == (3, 16)
    assert (folder / "samples" / "step-00000002.png").is_file()


@pytest.mark.parametrize("channels", [4, 8], ids=["sampled", "moments"])
def test_latents_train_end_to_end(tmp_path: Path, channels: int) -> None:
    shards = write_latents(tmp_path / "shards" / "0.tar", channels=channels).parent
    settings = ["data=latents", f"data.path={shards}", "data.num_classes=3", "train.workers=1"]
    folder = train(
        tmp_path / "run", *settings, "train.steps=2", "sample.every=2", "sample.steps=2", "validation.every=2"
    )
    assert len(losses(folder)) == 2
    assert final_state(folder)["model"]["patch_embed.weight"].shape == (16, 4)
    assert final_state(folder)["model"]["label_embed.weight"].shape == (4, 16)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
def test_weights_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(ConfigError, match=r"^model\.weights names '.*', which does not exist\.$"):
        train(tmp_path / "run", f"model.weights={path}")
    path.write_bytes(b"half a file")
    with pytest.raises(ConfigError, match=r"^model\.weights names '.*', which cannot be read; get it again\.$"):
        train(tmp_path / "run", f"model.weights={path}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.name=faces"], "there is no data=faces; choose one of: digits, images, latents."),
        (["data=images", "data.path=p", "data.size=big"], "data.size is 'big'; it must be a whole number."),
        (["data=images", "data.path=p", "data.flip=maybe"], "data.flip is 'maybe'; it must be true or false."),
        (["data=images", "data.path=3"], "no image folder at 3"),
        (["+data.size=3"], "data.size is a setting of data=images, but this run has data=digits: add data=images"),
        (["objective.time=never"], "objective.time is 'never'; it must be one of 'uniform', 'logit-normal'."),
        (["model.size=XXL/2"], "the model size is 'XXL/2'. Did you mean 'XL/2'?"),
        (["model.patch=3"], "input_size 8 does not divide into patches of 3"),
        (["model.tread_config=paper"], "route 2..-4 at 0.5 starts after it ends in a model of 5 layers"),
    ],
)
def test_settings_that_only_the_model_or_the_data_can_judge(tmp_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        train(tmp_path / "run", *settings)
    assert str(error.value).startswith(message)


def test_compile_leaves_the_names_alone(tmp_path: Path) -> None:
    plain, _ = make_session(tmp_path)
    compiled, _ = make_session(tmp_path, "train.compile=true")
    assert list(compiled.model.state_dict()) == list(plain.model.state_dict())


def test_the_first_line_counts_one_class_as_one(tmp_path: Path) -> None:
    images = write_images(tmp_path / "photos", "one", count=5)
    task, _ = make_session(
        tmp_path / "run", "data=images", f"data.path={images}", "data.size=4", "validation.samples=1"
    )
    assert "4 samples of 1 class (1 held out), 1 process on cpu" in task.summary()


def test_the_first_line_counts_processes_on_a_sort_of_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun each has its own index, and rank 0's is no fact about the run."""
    task, _ = make_session(tmp_path)
    monkeypatch.setattr(task.accelerator.state, "device", torch.device("cpu", 0))
    assert task.summary().endswith("1 process on cpu")
