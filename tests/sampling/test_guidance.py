"""Classifier-free guidance against its formula, branch by branch and sample by sample."""

import math

import pytest
import torch
from torch import Tensor

from tread.errors import ConfigError
from tread.sampling.guidance import classifier_free

NULL = 9
LABELS = torch.tensor([3, 0, 7, 3, 1])
X = torch.randn(5, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Recorder:
    """A field that is not linear in anything, and remembers the labels of each call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, x: Tensor, level: float, labels: Tensor) -> Tensor:
        self.calls.append(labels.tolist())
        return torch.sin(x * (1 + labels.view(-1, 1, 1, 1)) + level)


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 1.5, 4.0])
def test_formula_sample_by_sample(scale: float) -> None:
    guided = classifier_free(Recorder(), scale=scale, null_label=NULL)(X, 0.7, LABELS)
    assert guided.shape == X.shape
    for i, label in enumerate(LABELS.tolist()):
        cond = torch.sin(X[i] * (1 + label) + 0.7)
        uncond = torch.sin(X[i] * (1 + NULL) + 0.7)
        torch.testing.assert_close(guided[i], scale * cond + (1 - scale) * uncond, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("scale", "calls"), [(1.0, [[3, 0, 7, 3, 1]]), (0.0, [[NULL] * 5]), (1.5, [[3, 0, 7, 3, 1] + [NULL] * 5])]
)
def test_only_the_branches_needed_run_and_they_share_one_call(scale: float, calls: list[list[int]]) -> None:
    recorder = Recorder()
    classifier_free(recorder, scale=scale, null_label=NULL)(X, 0.7, LABELS)
    assert recorder.calls == calls


def test_outside_the_interval_the_conditional_branch_runs_alone() -> None:
    for scale in (0.0, 2.0):
        recorder = Recorder()
        field = classifier_free(recorder, scale=scale, null_label=NULL, interval=(0.2, 0.6))
        inside = classifier_free(Recorder(), scale=scale, null_label=NULL)
        guided_at: list[float] = []
        for level in (0.1, 0.2, 0.3, 0.6, 0.7):
            out = field(X, level, LABELS)
            if recorder.calls[-1] == LABELS.tolist():
                assert torch.equal(out, Recorder()(X, level, LABELS))
            else:
                guided_at.append(level)
                assert torch.equal(out, inside(X, level, LABELS))
        assert guided_at == [0.3, 0.6]  # open below, closed above


def test_a_network_without_a_null_label_can_run_unguided_only() -> None:
    assert torch.equal(
        classifier_free(Recorder(), scale=1, null_label=None)(X, 0.7, LABELS), Recorder()(X, 0.7, LABELS)
    )
    with pytest.raises(ConfigError) as error:
        classifier_free(Recorder(), scale=1.5, null_label=None)
    assert str(error.value) == (
        "guidance is 1.5, but the model has no label for 'no class'; set guidance to 1, or train it with class dropout."
    )


@pytest.mark.parametrize("interval", [(0.6, 0.2), (0.3, 0.3), (math.nan, 1.0)])
def test_an_empty_interval_is_refused(interval: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match=r"guidance interval is \(.*\); its lower end must be below"):
        classifier_free(Recorder(), scale=2.0, null_label=NULL, interval=interval)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0])
def test_a_scale_that_leads_nowhere_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError) as error:
        classifier_free(Recorder(), scale=scale, null_label=NULL)
    assert str(error.value) == f"guidance is {scale}; it must be a finite number of at least 0."
