"""`generate`: the right distribution, and samples that depend on seed, place and label and on nothing else."""

import warnings
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor, nn

from tests.tiny.gaussian import three_classes
from tread.errors import ConfigError, RiskWarning
from tread.objectives import EDM, Flow, Net, Objective
from tread.routing import noise
from tread.sampling.generate import generate
from tread.sampling.guidance import Branches
from tread.sampling.solvers import Churn

SHAPE = (2, 3, 4)
NULL = 4
LABELS = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])


class TinyNet(nn.Module):
    """Convolution, dropout and a label embedding; tiny, but its samples differ in every way they should."""

    def __init__(self) -> None:
        super().__init__()
        self.label = nn.Embedding(NULL + 1, 2)
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.dropout = nn.Dropout(0.5)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        shift = (self.label(labels) + time[:, None] / 1000)[..., None, None]
        return self.dropout(torch.tanh(self.conv(x) + shift))


def sample(net: Net | None = None, objective: Objective | None = None, labels: Tensor = LABELS, **changes: Any):
    settings: dict[str, Any] = {
        "shape": SHAPE,
        "seed": 0,
        "steps": 5,
        "null_label": NULL,
        "device": "cpu",
        "progress": False,
    }
    return generate(net or TinyNet(), objective or Flow(), labels, **(settings | changes))


@pytest.mark.parametrize(
    ("objective", "changes"),
    [
        (Flow(), {"guidance": 2.0, "interval": (0.1, 0.7)}),
        (Flow(), {"solver": "heun"}),
        (EDM(), {}),
        (EDM(), {"guidance": 1.5, "churn": Churn(s_churn=3)}),
    ],
)
def test_a_sample_depends_neither_on_batch_size_nor_on_how_the_work_is_shared(
    objective: Objective, changes: dict[str, Any]
) -> None:
    at_once = sample(objective=objective, **changes)
    in_threes = sample(objective=objective, batch_size=3, **changes)
    halves = [sample(objective=objective, labels=LABELS[i : i + 4], first_index=i, **changes) for i in (0, 4)]
    torch.testing.assert_close(in_threes, at_once, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat(halves), at_once, rtol=1e-5, atol=1e-5)
    twins = at_once[LABELS == 3]
    assert (twins[0] - twins[1]).abs().max() > 0.1  # same label, another place
    assert (sample(objective=objective, seed=1, **changes) - at_once).abs().amax((1, 2, 3)).min() > 0.1


@pytest.mark.parametrize(
    ("objective", "changes"), [(Flow(), {"guidance": 2.0}), (EDM(), {"guidance": 1.5, "churn": Churn(s_churn=3)})]
)
def test_a_seed_for_each_sample_draws_the_first_sample_of_each(objective: Objective, changes: dict[str, Any]) -> None:
    seeds = torch.tensor([7, 0, 2**32 - 1, 7, 12, 5, 1, 9])
    alone = [
        sample(objective=objective, labels=LABELS[i : i + 1], seed=int(seed), **changes) for i, seed in enumerate(seeds)
    ]
    for batch_size in (1, 3, 64):
        found = sample(objective=objective, seed=seeds, batch_size=batch_size, **changes)
        torch.testing.assert_close(found, torch.cat(alone), rtol=1e-5, atol=1e-5)
        if batch_size == 1:
            assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize("words", [(), (17,)])
def test_noise_of_a_seed_each_is_bit_identical(words: tuple[int, ...]) -> None:
    seeds = torch.tensor([3, 0, 2**32 - 1])
    found = noise.per_sample_normal(seeds, torch.zeros(3, dtype=torch.int64), (3, 7, 5), *words)
    alone = [noise.per_sample_normal(int(seed), torch.zeros(1, dtype=torch.int64), (3, 7, 5), *words) for seed in seeds]
    assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize("words", [(), (17,)])
def test_noise_is_bit_identical_for_every_split(words: tuple[int, ...]) -> None:
    whole = noise.per_sample_normal(5, torch.arange(101), (3, 7, 5), *words)
    assert whole.shape == (101, 3, 7, 5)
    for size in (1, 3, 64):
        parts = [noise.per_sample_normal(5, index, (3, 7, 5), *words) for index in torch.arange(101).split(size)]
        assert torch.equal(torch.cat(parts), whole)


def test_noise_is_normal_and_fresh_for_every_use() -> None:
    index = torch.arange(64)
    uses = [noise.per_sample_normal(0, index, (16, 16, 4)), noise.per_sample_normal(1, index, (16, 16, 4))]
    uses += [noise.per_sample_normal(0, index, (16, 16, 4), step) for step in (0, 1)]
    flat = torch.stack(uses).flatten(1).double()  # (4, 65536)
    torch.testing.assert_close(flat.mean(1), torch.zeros(4).double(), rtol=0, atol=0.02)
    torch.testing.assert_close(torch.cov(flat), torch.eye(4).double(), rtol=0, atol=0.03)
    quantiles = torch.tensor([0.01, 0.25, 0.5, 0.75, 0.99]).double()
    torch.testing.assert_close(flat[0].quantile(quantiles), torch.special.ndtri(quantiles), rtol=0, atol=0.05)


@pytest.mark.parametrize("guidance", [1.0, 1.5])
@pytest.mark.parametrize(
    ("objective", "changes"),
    [
        (EDM(), {"steps": 40}),
        (EDM(), {"steps": 80, "churn": Churn(s_churn=30)}),
        (Flow(), {"steps": 40, "solver": "heun"}),
        (Flow(shift=2.0), {"steps": 250}),
    ],
)
def test_gaussian_data_is_recovered_class_by_class(
    objective: EDM | Flow, changes: dict[str, Any], guidance: float
) -> None:
    data = three_classes()
    net = data.edm_net(objective) if isinstance(objective, EDM) else data.flow_net
    labels = torch.arange(2).repeat(4000)
    settings = {"shape": (3, 1, 1), "null_label": 2, "guidance": guidance, "batch_size": 3000, **changes}
    samples = sample(net, objective, labels, **settings).flatten(1).double()  # (8000, 3)
    for label in (0, 1):
        drawn = samples[labels == label]
        # classes with one covariance: guidance moves the mean alone, along the line between the two
        mean = data.means[2] + guidance * (data.means[label] - data.means[2])
        error = data.cov.diagonal().sqrt() / 4000**0.5
        assert ((drawn.mean(0) - mean).abs() < 4.5 * error + 0.01).all()
        torch.testing.assert_close(torch.cov(drawn.T), data.cov, rtol=0.05, atol=0.04)


def test_an_interval_without_a_level_is_said() -> None:
    plain = sample()
    with pytest.warns(RiskWarning, match=r"guidance does nothing: none of the levels 1 to 0\.2 is in .*\(5, 10\)"):
        assert sample(guidance=2.0, interval=(5, 10)).equal(plain)
    with pytest.raises(ConfigError, match="its lower end must be below"):
        sample(guidance=2.0, interval=(0.8, 0.2))
    with warnings.catch_warnings(action="error"):  # without guidance there is nothing to be lost
        assert sample(guidance=1.0, interval=(5, 10)).equal(plain)


def test_the_default_solver_is_the_objectives_own() -> None:
    assert torch.equal(sample(objective=EDM()), sample(objective=EDM(), solver="heun"))
    assert torch.equal(sample(objective=Flow()), sample(objective=Flow(), solver="euler"))
    assert not torch.equal(sample(objective=Flow()), sample(objective=Flow(), solver="heun"))


def test_every_module_gets_its_mode_back() -> None:
    net = TinyNet().train()
    net.conv.eval()
    sampled = sample(net)
    assert [net.training, net.conv.training, net.dropout.training] == [True, False, True]
    torch.testing.assert_close(sampled, sample(net.eval()))  # no dropout while sampling
    assert not any(module.training for module in net.modules())


def test_the_weak_network_samples_in_eval_mode_too() -> None:
    net, weak = TinyNet(), TinyNet().train()
    settings: dict[str, Any] = {"guidance": 2.0, "branches": Branches(kind="ag")}
    sampled = sample(net, weak=weak, **settings)
    assert weak.training
    assert sample(net, weak=weak.eval(), **settings).equal(sampled)


def test_a_network_with_a_mode_of_its_own_is_told_of_both_changes() -> None:
    class Merging(TinyNet):
        told: ClassVar[list[bool]] = []

        def train(self, mode: bool = True) -> Self:
            self.told.append(mode)
            return super().train(mode)

    sample(Merging())
    assert Merging.told == [False, True]


def test_a_failing_network_gets_its_mode_back_too() -> None:
    net = TinyNet().train()
    with pytest.raises(IndexError):
        sample(net, labels=torch.tensor([99]))
    assert all(module.training for module in net.modules())


def test_no_gradients_and_no_global_randomness() -> None:
    net = TinyNet()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = sample(net, EDM(), churn=Churn(s_churn=3))
    assert torch.equal(torch.get_rng_state(), state)
    assert not first.requires_grad
    torch.manual_seed(1)
    assert torch.equal(sample(net, EDM(), churn=Churn(s_churn=3)), first)


def test_state_stays_float32_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        half = sample(objective=EDM())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, sample(objective=EDM()), rtol=0.05, atol=0.05)


def test_no_labels_give_no_samples() -> None:
    assert sample(labels=LABELS[:0]).shape == (0, *SHAPE)


def test_progress_bar_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    sample(progress=False)
    assert capsys.readouterr().err == ""
    sample(progress=True, batch_size=3)
    assert "8/8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("objective", "changes", "message"),
    [
        (Flow(), {"solver": "dpm"}, "solver is 'dpm'. Choose one of: euler, heun."),
        (Flow(), {"steps": 0}, "steps is 0; sampling needs at least 1 step."),
        (Flow(), {"batch_size": 0}, "batch_size is 0; sampling needs at least 1."),
        (
            Flow(),
            {"solver": "heun", "churn": Churn(s_churn=1)},
            "churn is set, but it needs the objective 'edm' with the solver 'heun'; set it to 0.",
        ),
        (
            EDM(),
            {"solver": "euler", "churn": Churn(s_churn=1)},
            "churn is set, but it needs the objective 'edm' with the solver 'heun'; set it to 0.",
        ),
        (Flow(), {"guidance": -1.0}, "guidance is -1.0; it must be a finite number of at least 0."),
        (
            EDM(),
            {"guidance": 2.0, "interval": (5.0, 0.3)},
            "guidance interval is (5.0, 0.3); its lower end must be below its upper end.",
        ),
    ],
)
def test_impossible_settings_are_refused(objective: Objective, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        sample(objective=objective, **changes)
    assert str(error.value) == message


def test_labels_must_be_one_a_sample() -> None:
    with pytest.raises(ValueError, match=r"labels have shape \(8, 1\); sampling needs one label a sample, \(N,\)"):
        sample(labels=LABELS[:, None])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("objective", [EDM(), Flow()])
def test_the_gpu_makes_the_same_samples(objective: Objective) -> None:
    changes: dict[str, Any] = {"guidance": 1.5, "batch_size": 3}
    there = sample(TinyNet().cuda(), objective, device="cuda", **changes)
    assert there.device.type == "cuda"
    torch.testing.assert_close(there.cpu(), sample(objective=objective, **changes), rtol=1e-2, atol=1e-2)
