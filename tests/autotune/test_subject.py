"""What is measured of a model, against the same figures computed another way."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from tests.autotune.tuned import SCRATCH
from tests.report.conftest import Tune
from tests.tiny.pictures import write_clips
from tests.tiny.runs import forget
from tread.attach.registry import family_of
from tread.autotune.cost import Routes, routes_of
from tread.autotune.jobs.finetuning import FinetuneTuning
from tread.autotune.jobs.job import stacks_of
from tread.autotune.jobs.pretraining import PretrainTuning
from tread.autotune.jobs.trainer import TrainerLoop
from tread.autotune.measure import measure_kept, measure_losses
from tread.autotune.subject import LEVELS, Subject
from tread.config.schema import parse
from tread.finetune.loss import VALIDATION as TUNE_VALIDATION
from tread.finetune.run import finetune
from tread.finetune.settings import FinetuneConfig
from tread.pretrain.config import compose
from tread.pretrain.task import VALIDATION, Pretraining
from tread.routing import noise

pytestmark = pytest.mark.filterwarnings("ignore")
PLAN: Routes = routes_of("2..4@0.5 6..6@0.25")


def trainer(subject: Subject) -> TrainerLoop:
    """The loop of a job."""
    assert isinstance(subject.loop, TrainerLoop)
    return subject.loop


def from_scratch(tmp_path: Path, *settings: str) -> Subject:
    """A DiT with random weights, none of them 0."""
    config = compose([*SCRATCH, f"output_dir={tmp_path / 'run'}", *settings])
    subject = Subject(PretrainTuning(config).open(tmp_path, (0.25, 0.5)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in subject.loop.model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        ema = trainer(subject).session.ema
        assert ema is not None
        for average, parameter in zip(ema.averages.values(), subject.loop.model.parameters(), strict=True):
            average.copy_(parameter)
    return subject


def tuned(tune: Tune, tmp_path: Path, **changes: Any) -> Subject:
    config = parse(FinetuneConfig, tune("flux", cache_dir=str(tmp_path / "cache"), validation_prompt=None, **changes))
    return Subject(FinetuneTuning(config).open(tmp_path, (0.25, 0.5)))


def test_losses_are_those_of_a_model_with_these_routes(tmp_path: Path) -> None:
    """A second model, made with the plan by the job itself, and its objective called by hand."""
    subject = from_scratch(tmp_path)
    with subject.evaluating():
        found = subject.losses(PLAN)
    forget()
    routes = {"routes": [route.to_config() for route in PLAN]}
    config = compose([*SCRATCH, f"output_dir={tmp_path / 'other'}", "validation.samples=0"])
    config = replace(config, model=replace(config.model, tread_config=routes))
    task = Pretraining(config, Accelerator(cpu=True), tmp_path)
    task.model.load_state_dict(subject.loop.model.state_dict())
    task.model.eval()
    batches = [batch for _, batch in zip(range(2), task.batches(0), strict=False)]
    assert task.handle is not None
    for u, (dense, routed) in zip(LEVELS, found, strict=True):
        expected: dict[str, list[Tensor]] = {"dense": [], "routed": []}
        for index, (x, labels, where) in enumerate(batches):
            x = task.dataset.prepare(x, VALIDATION, where)
            drawn = noise.per_sample_normal(VALIDATION, where, x.shape[1:])
            for name, mode in (("dense", task.handle.dense()), ("routed", task.handle.routed(step=index))):
                with mode, torch.no_grad():
                    losses = task.objective.loss(task.model, x, labels, noise=drawn, u=torch.full((len(x),), u))
                expected[name].append(losses.mean())
        assert dense == pytest.approx(float(torch.stack(expected["dense"]).mean()), rel=1e-5)
        assert routed == pytest.approx(float(torch.stack(expected["routed"]).mean()), rel=1e-5)
        assert abs(routed / dense - 1) > 1e-4


def test_kept_tokens_carry_the_loss_of_a_fine_tune_dense_and_routed(tune: Tune, tmp_path: Path) -> None:
    """Predictions are recorded on their way; the error of kept tokens is computed from them, patch by patch."""
    subject = tuned(tune, tmp_path)
    task: Any = trainer(subject).task
    recorded: list[tuple[Tensor, Tensor]] = []
    predict = task.family.predict

    def recording(model: Any, noisy: Tensor, time: Tensor, batch: Any) -> Tensor:
        prediction = predict(model, noisy, time, batch)
        recorded.append((prediction, batch["mean"]))
        return prediction

    task.family.predict = recording
    routes = routes_of("2..2@0.5")
    with subject.evaluating():
        (dense, routed), *_ = subject.losses(routes)
    pairs = []
    for index, batch in enumerate(subject.opened.batches):
        handle = subject.handles[0]
        with subject.routed(routes), handle.routed(step=index):
            task.losses_at(batch, LEVELS[0])
            kept = handle.kept  # (B, S)
        assert kept is not None
        assert kept.sum(1).tolist() == [8] * len(kept)
        where = batch.tensors["position"]
        x = batch.tensors["mean"].float()
        if "std" in batch.tensors:
            x = x + batch.tensors["std"] * noise.per_sample_normal(
                TUNE_VALIDATION, where, x.shape[1:], int.from_bytes(b"late")
            )
        drawn = noise.per_sample_normal(TUNE_VALIDATION, where, x.shape[1:], int.from_bytes(b"nois"))
        grid = kept.view(-1, x.shape[-2] // 2, x.shape[-1] // 2)  # FLUX: two latents on a side of a token
        mask = grid.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, None].expand_as(x)
        # batch by batch at the first level: routed, then dense
        for place in (0, 1):
            prediction = recorded[2 * index + place][0]
            error = (prediction - (drawn - x)).square()
            pairs.append((place, float((error * mask).sum() / mask.sum())))
    assert routed == pytest.approx(sum(loss for place, loss in pairs if place == 0) / 2, rel=1e-4)
    assert dense == pytest.approx(sum(loss for place, loss in pairs if place == 1) / 2, rel=1e-4)


def test_a_window_that_drops_nothing_has_no_gap(tune: Tune, tmp_path: Path) -> None:
    subject = tuned(tune, tmp_path, routed_loss="all")
    with subject.evaluating():
        for dense, routed in subject.losses(routes_of("2..2@0.05")):  # int(16 * 0.05) is 0
            assert routed == pytest.approx(dense, rel=1e-6)
        half, some = (subject.losses(routes_of(f"2..2@{ratio}")) for ratio in (0.5, 0.25))
    assert any(dense != routed for dense, routed in half)
    assert [dense for dense, _ in half] == [dense for dense, _ in some], "dense is judged on all tokens"


def test_more_tokens_of_the_same_ones_are_dropped_at_higher_ratios(tmp_path: Path) -> None:
    subject = from_scratch(tmp_path)
    kept: dict[str, Tensor] = {}
    for name in ("2..4@0.25", "3..3@0.25", "2..4@0.5"):
        with subject.evaluating(), subject.routed(routes_of(name)):
            subject.losses(routes_of(name))
            mask = subject.handles[0]
            with mask.routed(step=0):
                subject.loop.losses_at(subject.opened.batches[0], 0.5)
            assert mask.kept is not None
            kept[name] = mask.kept
    assert torch.equal(kept["2..4@0.25"], kept["3..3@0.25"])
    assert torch.all(kept["2..4@0.25"] | ~kept["2..4@0.5"])


def test_timed_steps_leave_the_weights(tmp_path: Path) -> None:
    subject = from_scratch(tmp_path)
    before = {name: tensor.clone() for name, tensor in subject.loop.model.state_dict().items()}
    step = subject.stepping()
    with subject.routed(PLAN):
        values = step()
        assert subject.handles[0].kept_share == pytest.approx((3 * 32 + 48) / (4 * 64))
    with subject.routed(()):
        step()
    assert subject.handles[0].kept_share == 1
    assert float(values["grad_norm"]) > 0
    for name, tensor in subject.loop.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert trainer(subject).session.config.optimizer.learning_rate > 0


@pytest.mark.parametrize(
    "settings",
    [
        ("optimizer.schedule=cosine", "optimizer.end_rate=0.01"),
        ("optimizer.name=prodigy", "optimizer.learning_rate=1"),
        ("optimizer.name=adamw-schedule-free",),
    ],
)
def test_timed_steps_leave_the_weights_whatever_the_rate_is_of(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """A rate of 0 is below the end of a schedule and below what prodigy may be given; a config could not say it."""
    subject = from_scratch(tmp_path, *settings)
    before = [parameter.clone() for parameter in subject.loop.model.parameters()]
    subject.stepping()()
    for parameter, weights in zip(subject.loop.model.parameters(), before, strict=True):
        assert torch.equal(parameter, weights)


def test_a_timed_step_of_prodigy_is_a_whole_one(tmp_path: Path) -> None:
    """At a rate of 0 it computes neither moments nor update, and would be timed too short; weights of 0 stay too."""
    subject = from_scratch(
        tmp_path, "optimizer.name=prodigy", "optimizer.learning_rate=1", "optimizer.weight_decay=0.1"
    )
    weights = list(subject.loop.model.parameters())
    with torch.no_grad():
        weights[-1].zero_()
    before = [weight.clone() for weight in weights]
    step = subject.stepping()
    for _ in range(3):
        step()
    optimizer: Any = trainer(subject).session.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)
    assert all(optimizer.state[weight]["step"] == 3 for weight in weights)
    assert all(bool(optimizer.state[weight]["exp_avg"].any()) for weight in weights)
    assert all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))


def test_timed_steps_leave_the_average(tmp_path: Path) -> None:
    """Sensitivity is measured on it, and that of a trained run is not its weights."""
    subject = from_scratch(tmp_path)
    ema = trainer(subject).session.ema
    assert ema is not None
    for average in ema.averages.values():
        average.mul_(0.5)
    before = {name: average.clone() for name, average in ema.averages.items()}
    decay = ema.decay_at(3)
    subject.stepping()()
    for name, average in ema.averages.items():
        assert torch.equal(average, before[name]), name
    assert ema.decay_at(3) == decay < 1


@pytest.mark.parametrize("settings", [(), ("optimizer.name=adamw-schedule-free",)])
def test_a_start_is_the_same_whatever_was_timed_before(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """So that a tuning that goes on measures the same model."""
    weights = []
    for timed in (0, 3):
        forget()
        subject = from_scratch(tmp_path, *settings)
        step = subject.stepping()
        for _ in range(timed):
            step()
        subject.start(4, lambda steps: steps)
        weights.append([parameter.clone() for parameter in subject.loop.model.parameters()])
        assert subject.handles[0].kept_share == 1
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)


def test_a_run_that_has_no_checkpoint_yet_begins_with_new_weights(tune: Tune, tmp_path: Path) -> None:
    """`tread init` writes `latest` into every config: the run that it is to resume may not have begun."""
    assert from_scratch(tmp_path, "resume=latest").opened.start is not None
    forget()
    scratch = {"init": "scratch", "model_type": "full", "routed_loss": "all"}
    subject = tuned(tune, tmp_path, resume_from_checkpoint="latest", output_dir=str(tmp_path / "none"), **scratch)
    assert subject.opened.start is not None


def test_a_resumed_fine_tune(tune: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its checkpoint has the adapter, so that the one it began from may be gone; it saw more data than two batches."""
    config = tune("flux", output_dir=str(tmp_path / "run"), max_train_steps=1, validation_prompt=None)
    finetune(parse(FinetuneConfig, config))
    forget()
    later = {"resume_from_checkpoint": "latest", "init_lora": str(tmp_path / "gone.safetensors")}
    subject = Subject(FinetuneTuning(parse(FinetuneConfig, config | later)).open(tmp_path, (0.25, 0.5)))
    assert len(subject.opened.batches) * 2 < 6
    assert "resumed from" in capsys.readouterr().out


@pytest.mark.parametrize(("ratio", "kept"), [(0.25, 48), (0.5, 32)])
def test_tokens_that_a_ratio_keeps(tmp_path: Path, ratio: float, kept: int) -> None:
    subject = from_scratch(tmp_path)
    assert subject.kept(ratio) == kept
    tokens = subject.tokens({ratio: kept})
    assert (tokens.count, tokens.kept(ratio)) == (64, kept)


def test_stacks_of_a_stock_model_and_what_is_trained_of_it(tune: Tune, tmp_path: Path) -> None:
    subject = tuned(tune, tmp_path)
    assert [(s.name, s.first, s.last) for s in subject.stacks] == [
        ("transformer_blocks", 0, 1),
        ("single_transformer_blocks", 2, 4),
    ]
    assert stacks_of(subject.loop.model, family_of(subject.loop.model)) == subject.stacks
    assert (subject.rules.tokens, subject.rules.adapts, subject.opened.start) == (16, True, None)
    assert "of 5 layers" in subject.summary()


def test_masks_force_tokens_in_every_measurement(tune: Tune, tmp_path: Path) -> None:
    """What a batch keeps is what a forward shows, and the count of a ratio that was not tried follows from its mask."""
    subject = tuned(tune, tmp_path)
    batch = subject.opened.batches[0]
    forced = torch.zeros(2, 16, dtype=torch.bool)
    forced[0, :6] = True
    opened = replace(subject.opened, batches=[replace(batch, forced=forced)], forced=6)
    masked = Subject(opened)
    kept = masked.kept(0.5)
    assert kept == masked.tokens({}).kept(0.5) == 11


def test_both_transformers_of_a_model_are_measured(tune: Tune, tmp_path: Path) -> None:
    """Each noise level is measured on the transformer whose range it is in, with the same routes."""
    config = tune("wan-a14b", cache_dir=str(tmp_path / "cache"), validation_prompt=None, train_batch_size=1)
    config |= {"init": "scratch", "transformer": {"num_layers": 6}, "routed_loss": "all", "model_type": "full"}
    config["data"] = [config["data"], {**config["data"], "instance_data_dir": str(write_clips(tmp_path / "more"))}]
    subject = Subject(FinetuneTuning(parse(FinetuneConfig, config)).open(tmp_path, (0.25, 0.5)))
    task: Any = trainer(subject).task
    asked = []
    for part, model in task.models.items():
        model.register_forward_hook(lambda *_, part=part: asked.append((part, len(task.handles[part].selections))))
    with subject.evaluating():
        subject.losses(routes_of("2..3@0.5"))
    assert {part for part, _ in asked} == {"transformer", "transformer_2"}
    assert {part for part, routes in asked if routes} == {"transformer", "transformer_2"}


def test_measurements_are_made_once(tmp_path: Path) -> None:
    from tread.autotune.measure import Budget
    from tread.autotune.store import Store

    subject = from_scratch(tmp_path)
    store = Store(tmp_path, {"a": 1}, {})
    plans = [routes_of(name) for name in ("2..3@0.5", "4..5@0.25")]
    first = measure_losses(subject, store, plans[:1], Budget(1e9, lambda: 0.0))
    both = measure_losses(subject, store, plans, Budget(1e9, lambda: 0.0))
    assert list(both) == ["2..3@0.5", "4..5@0.25"]
    assert both["2..3@0.5"] is first["2..3@0.5"]
    assert measure_kept(subject, store, (0.5,)) == {0.5: 32}


def test_pairs_are_timed_in_alternating_order(tmp_path: Path) -> None:
    """A clock that drifts one way makes the first of a pair look fast, in one pair, and slow in the next."""
    from tread.autotune.measure import Budget, measure_pairs
    from tread.autotune.store import Store

    subject = from_scratch(tmp_path)
    ticks = iter(range(1, 7))
    plan = routes_of("2..3@0.5")
    store = Store(tmp_path, {}, {})
    found = measure_pairs(subject, store, [plan], lambda step: float(next(ticks)), Budget(1e9, lambda: 0.0))
    assert [(pair["dense"], pair["routed"]) for pair in found["2..3@0.5"]] == [(1.0, 2.0), (4.0, 3.0), (5.0, 6.0)]
