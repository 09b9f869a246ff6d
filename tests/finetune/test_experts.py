"""Which transformer a micro-batch goes to: shares, ranges, and one expert alone."""

from pathlib import Path

import pytest
import torch

from tests.tiny.pipelines import PipelineFolder
from tread.finetune.experts import Range, choose, ranges
from tread.finetune.families import open_family
from tread.finetune.model.source import Source
from tread.finetune.target import FlowTarget
from tread.routing import noise

BOTH = ("transformer", "transformer_2")


@pytest.fixture(scope="module")
def folder(pipeline_folder: PipelineFolder) -> Path:
    return pipeline_folder("wan-a14b")


def test_every_time_goes_to_the_expert_the_sampler_asks(folder: Path) -> None:
    """Over many draws each time is as frequent as for a single model, and none is on the wrong side of the boundary."""
    family = open_family("wan", Source(str(folder)))
    boundary, target = family.source.index["boundary_ratio"], FlowTarget(shift=3.0)
    found = ranges(family, target, BOTH, tokens=100)
    times = {part: [] for part in BOTH}
    for i in range(4000):
        span = choose(found, float(noise.uniform(0, i)))
        u = span.spread(noise.uniform(1, torch.tensor([i])))
        times[span.expert].append(float(target.times(u, 100)))
    assert min(times["transformer"]) >= boundary > max(times["transformer_2"])
    drawn = torch.tensor([*times["transformer"], *times["transformer_2"]]).sort().values
    expected = target.times((torch.arange(4000) + 0.5) / 4000, 100)
    assert (drawn - expected).abs().max() < 0.05


def test_one_expert_alone_sees_its_own_range(folder: Path) -> None:
    family = open_family("wan", Source(str(folder)))
    (low,) = ranges(family, FlowTarget(shift=3.0), ["transformer_2"], tokens=100)
    assert choose([low], 0.999) is low
    assert low.low == 0.0
    assert low.high == pytest.approx(FlowTarget(shift=3.0).cdf(family.source.index["boundary_ratio"], 100))


def test_shares_are_the_ranges() -> None:
    spans = [Range("a", 0.75, 1.0), Range("b", 0.0, 0.75)]
    assert [choose(spans, u).expert for u in (0.0, 0.24, 0.26, 0.99)] == ["a", "a", "b", "b"]
    assert spans[1].spread(torch.tensor([0.0, 1.0])).tolist() == [0.0, 0.75]
