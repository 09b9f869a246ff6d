"""Every kind of guidance against its formula, on a network whose answer is known: label, training and kept tokens."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tread.errors import ConfigError
from tread.models import DiT
from tread.objectives import EDM, Flow, Objective
from tread.routing.handle import Handle
from tread.routing.plan import RoutePlan
from tread.sampling.generate import flops_per_sample, generate
from tread.sampling.guidance import Branches, Ratio, cosine, sparse

NULL = 4
SIDE = 8
LABELS = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])
ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 3}
PLAN = RoutePlan.from_config({"routes": [ROUTE], "seed": 3})


class Counting(nn.Module):
    """Each pixel is a token, and the answer for it is its label plus `worth` for every layer that saw it: two of the
    five layers are routed, so the mean over a sample is label + worth * (3 + 2 * kept share)."""

    def __init__(self, worth: float = 1.0) -> None:
        super().__init__()
        self.worth = worth
        self.routing = Handle(PLAN, depth=5)
        self.calls: list[tuple[list[int], int]] = []  # labels, kept tokens

    def forward(self, x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        state = self.routing.begin(training=self.training)
        tokens = torch.zeros_like(x).flatten(1).unsqueeze(-1)  # (B, S, 1)
        lengths = []
        for layer in range(5):
            tokens = state.enter(layer, tokens) + self.worth  # (B, K, 1)
            lengths.append(tokens.shape[1])
            tokens = state.exit(layer, tokens)  # (B, S, 1)
        self.calls.append((labels.tolist(), lengths[2]))
        return tokens.view_as(x) + labels.view(-1, 1, 1, 1)


def known(labels: Tensor, kept: int, worth: float = 1.0) -> Tensor:
    return labels + worth * (3 + 2 * kept / 64)


X = torch.zeros(8, 1, SIDE, SIDE)
LEVELS = [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]


def field(net: Counting, branches: Branches, *, weak: Counting | None = None, **changes: Any):
    settings: dict[str, Any] = {"scale": 1.5, "interval": None, "null_label": NULL, "levels": LEVELS, "seed": 0}
    settings |= {"samples": torch.arange(8)}
    return branches.field(Flow(), net.eval(), weak=None if weak is None else weak.eval(), **(settings | changes))


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.5, 4.0])
@pytest.mark.parametrize(
    ("branches", "strong", "weak"),
    [
        (Branches(), known(LABELS, 64), known(torch.tensor(NULL), 64)),
        (Branches(strong_ratio=0.25), known(LABELS, 48), known(torch.tensor(NULL), 48)),
        (Branches(kind="sg"), known(LABELS, 64), known(LABELS, 20)),
        (Branches(kind="sg", strong_ratio=0.5, weak_ratio=0.75), known(LABELS, 32), known(LABELS, 16)),
        (Branches(kind="cfg+sg", weak_ratio=0.75), known(LABELS, 64), known(torch.tensor(NULL), 16)),
        (Branches(kind="ag"), known(LABELS, 64), known(LABELS, 64, 0.3)),
        (Branches(kind="ag", strong_ratio=0.5), known(LABELS, 32), known(LABELS, 32, 0.3)),
        (Branches(kind="ag+sg", strong_ratio=0.25, weak_ratio=0.75), known(LABELS, 48), known(LABELS, 16, 0.3)),
    ],
)
def test_formula(branches: Branches, strong: Tensor, weak: Tensor, scale: float) -> None:
    lesser = Counting(0.3) if branches.needs_weak else None
    slope = field(Counting(), branches, weak=lesser, scale=scale)(X, 0.6, LABELS)
    torch.testing.assert_close(slope.mean((1, 2, 3)), scale * strong + (1 - scale) * weak)


@pytest.mark.parametrize("scale", [1.0, 0.0])
@pytest.mark.parametrize("kind", ["sg", "cfg+sg", "ag", "ag+sg"])
def test_a_branch_that_is_not_needed_does_not_run(kind: str, scale: float) -> None:
    net, weak = Counting(), Counting(0.3) if kind.startswith("ag") else None
    field(net, Branches(kind=kind), weak=weak, scale=scale)(X, 0.6, LABELS)
    assert len(net.calls) + (0 if weak is None else len(weak.calls)) == 1


@pytest.mark.parametrize("kind", ["cfg", "sg", "cfg+sg", "ag", "ag+sg"])
def test_outside_the_interval_the_strong_branch_runs_alone_and_once(kind: str) -> None:
    net, weak = Counting(), Counting(0.3) if kind.startswith("ag") else None
    slope = field(net, Branches(kind=kind, strong_ratio=0.25), weak=weak, interval=(0.2, 0.5))
    for level in (0.1, 0.2, 0.6):
        torch.testing.assert_close(slope(X, level, LABELS).mean((1, 2, 3)), known(LABELS, 48))
    assert net.calls == [(LABELS.tolist(), 48)] * 3
    assert weak is None or weak.calls == []
    slope(X, 0.5, LABELS)
    assert sum(len(labels) for labels, _ in net.calls[3:] + ([] if weak is None else weak.calls)) == 16


def test_equal_branches_are_unguided() -> None:
    """Bit for bit: branches of one evaluation draw the same numbers."""
    equal = field(Counting(), Branches(kind="sg", strong_ratio=0.5, weak_ratio=0.5), scale=3.0)
    alone = field(Counting(), Branches(strong_ratio=0.5), scale=1.0)
    assert torch.equal(equal(X, 0.6, LABELS), alone(X, 0.6, LABELS))
    same = field(Counting(), Branches(kind="ag"), weak=Counting(), scale=3.0)
    assert torch.equal(same(X, 0.6, LABELS), Counting().eval()(X, X, LABELS))


def test_the_weak_branch_keeps_a_part_of_what_the_strong_one_keeps() -> None:
    net = Counting().eval()
    kept = []
    for ratio in (0.25, 0.75):
        sparse(Flow().field(net), net.routing, lambda _, ratio=ratio: ratio)(X, 0.6, LABELS)
        kept.append(net.routing.kept)
    assert kept[0] is not None
    assert kept[1] is not None
    assert (kept[0] & kept[1]).equal(kept[1])


def chosen(net: Counting, samples: Tensor, level: float, seed: int = 0) -> Tensor:
    ratio: Ratio = lambda _: 0.5  # noqa: E731
    sparse(Flow().field(net), net.routing, ratio, seed=seed, samples=samples)(X[: len(samples)], level, samples % 4)
    return net.routing.selections[0]


def test_selections_depend_on_seed_level_and_sample_and_on_nothing_else() -> None:
    net, index = Counting().eval(), torch.arange(8)
    before = net.routing.state_dict()
    first = chosen(net, index, 0.6)
    assert chosen(net, index, 0.6).equal(first)
    assert net.routing.state_dict() == before, "training goes on as if nothing had been sampled"
    net.routing.set_step(17)
    assert chosen(net, index[3:6], 0.6).equal(first[3:6])
    for other in (chosen(net, index, 0.4), chosen(net, index, 0.6, seed=1), chosen(net, index + 8, 0.6)):
        assert not (other == first).all(1).any()


def test_both_halves_of_classifier_free_guidance_drop_the_same_tokens() -> None:
    net = Counting()
    field(net, Branches(strong_ratio=0.5))(X, 0.6, LABELS)
    cond, uncond = net.routing.selections[0].chunk(2)
    assert cond.equal(uncond)


def test_the_cosine_takes_both_ratios_to_zero() -> None:
    net = Counting()
    slope = field(net, Branches(kind="sg", strong_ratio=0.5, weak_ratio=0.75, schedule="cosine"))
    for level in LEVELS[:-1]:
        slope(X, level, LABELS)
    shares = [0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(5)]
    expected = [64 - int(64 * ratio * share) for share in shares for ratio in (0.75, 0.5)]
    assert [kept for _, kept in net.calls] == expected
    assert expected[-2:] == [64, 64]


def test_a_level_that_churn_raised_counts_with_the_next_lower_one() -> None:
    ratio = cosine(0.6, 0.2, LEVELS)
    assert ratio(0.65) == ratio(0.6)
    assert (ratio(2.0), ratio(1.0), ratio(0.01)) == (0.6, 0.6, pytest.approx(0.2))


def tiny_dit(seed: int = 0) -> DiT:
    torch.manual_seed(seed)
    model = DiT(input_size=SIDE, patch=1, in_channels=1, depth=5, width=16, heads=2, num_classes=NULL)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.route(PLAN)
    return model


def sample(net: nn.Module, objective: Objective, labels: Tensor = LABELS, **changes: Any) -> Tensor:
    settings: dict[str, Any] = {"shape": (1, SIDE, SIDE), "seed": 0, "steps": 4, "guidance": 2.0, "null_label": NULL}
    return generate(net, objective, labels, **(settings | changes), device="cpu", progress=False)


@pytest.mark.parametrize("objective", [Flow(), EDM()])
@pytest.mark.parametrize("kind", ["sg", "cfg+sg", "ag+sg"])
def test_a_sample_depends_neither_on_batch_size_nor_on_how_the_work_is_shared(kind: str, objective: Objective) -> None:
    net = tiny_dit()
    changes: dict[str, Any] = {"branches": Branches(kind=kind, strong_ratio=0.25, schedule="cosine")}
    if kind == "ag+sg":
        changes["weak"] = tiny_dit(1)
    at_once = sample(net, objective, **changes)
    halves = [sample(net, objective, LABELS[i : i + 4], first_index=i, **changes) for i in (0, 4)]
    torch.testing.assert_close(sample(net, objective, batch_size=3, **changes), at_once, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat(halves), at_once, rtol=1e-4, atol=1e-4)
    assert (at_once - sample(net, objective, guidance=1.0, **changes)).abs().max() > 1e-2
    assert net.training, "the mode is given back"
    assert "weak" not in changes or changes["weak"].training


@pytest.mark.parametrize("kind", ["cfg", "cfg+sg"])
def test_a_seed_for_each_sample_drops_the_tokens_of_the_first_sample_of_each(kind: str) -> None:
    net, branches = tiny_dit(), Branches(kind=kind, strong_ratio=0.25)
    seeds = torch.tensor([5, 0, 7])
    together = sample(net, Flow(), LABELS[:3], seed=seeds, branches=branches)
    alone = [sample(net, Flow(), LABELS[i : i + 1], seed=int(seeds[i]), branches=branches) for i in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"interval": (0.3, 0.8)},
        {"branches": Branches(kind="sg", weak_ratio=0.75)},
        {"branches": Branches(kind="cfg+sg", strong_ratio=0.5, schedule="cosine")},
        {"branches": Branches(kind="ag"), "weak": tiny_dit(1)},
    ],
)
@pytest.mark.parametrize("objective", [Flow(), EDM()])
def test_flops_are_those_of_sampling(objective: Objective, changes: dict[str, Any]) -> None:
    net = tiny_dit()
    settings = {"shape": (1, SIDE, SIDE), "seed": 0, "steps": 4, "guidance": 2.0, "null_label": NULL} | changes
    counted = flops_per_sample(net, objective, **settings)
    # torch does not count the CPU's fused attention
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        sample(net, objective, LABELS[:2], **changes)
    assert counter.get_total_flops() == 2 * counted
    assert {parameter.device.type for parameter in net.parameters()} == {"cpu"}
    assert net.routing is not None
    assert net.routing.ratios(training=False) == (0.0,)


def test_sparse_guidance_costs_less_than_classifier_free() -> None:
    settings: dict[str, Any] = {"shape": (1, SIDE, SIDE), "seed": 0, "steps": 4, "null_label": NULL}
    plain, cfg, sg = (
        flops_per_sample(tiny_dit(), Flow(), **settings, guidance=guidance, branches=branches)
        for guidance, branches in ((1.0, None), (2.0, None), (2.0, Branches(kind="sg", weak_ratio=0.75)))
    )
    assert cfg == 2 * plain
    assert plain < sg < cfg


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "sag"}, "guidance kind is 'sag'. Did you mean 'sg'? Choose one of: cfg, sg, cfg+sg, ag, ag+sg."),
        ({"strong_ratio": 1.0}, "strong ratio is 1.0; allowed is 0 <= value < 1."),
        ({"kind": "sg", "weak_ratio": -0.1}, "weak ratio is -0.1; allowed is 0 <= value < 1."),
        (
            {"kind": "sg", "strong_ratio": 0.8},
            "weak ratio is 0.7 and strong ratio 0.8; the weak branch must drop at least as much. Raise the weak ratio "
            "or lower the strong one.",
        ),
        (
            {"weak_ratio": 0.7},
            "weak ratio is 0.7, but the guidance kind 'cfg' has no sparse branch; leave it out, or choose sg, cfg+sg "
            "or ag+sg.",
        ),
        ({"schedule": "cosine"}, "ratio schedule is 'cosine', but both ratios are 0; leave it out."),
        (
            {"kind": "sg", "schedule": "cosin"},
            "ratio schedule is 'cosin'. Did you mean 'cosine'? Choose one of: constant, cosine.",
        ),
    ],
)
def test_impossible_branches_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Branches(**settings)
    assert str(error.value) == message


def test_what_each_kind_needs() -> None:
    """Networks for the branches: routes, a label for no class, another network."""
    needs = {kind: Branches(kind=kind) for kind in ("cfg", "sg", "cfg+sg", "ag", "ag+sg")}
    assert [kind for kind, branches in needs.items() if branches.needs_routes] == ["sg", "cfg+sg", "ag+sg"]
    assert [kind for kind, branches in needs.items() if branches.needs_null_label] == ["cfg", "cfg+sg"]
    assert [kind for kind, branches in needs.items() if branches.needs_weak] == ["ag", "ag+sg"]
    assert Branches(strong_ratio=0.5, schedule="cosine").needs_routes
    assert Branches(kind="sg", schedule="cosine").strong_ratio == 0, "one ratio above 0 is enough for a schedule"


def test_what_a_network_must_have() -> None:
    net = tiny_dit()
    with pytest.raises(ConfigError, match="guidance kind 'ag' needs a weak model, such as an earlier checkpoint"):
        sample(net, Flow(), branches=Branches(kind="ag"))
    with pytest.raises(ConfigError, match="guidance kind 'sg' has no use for a weak model"):
        sample(net, Flow(), branches=Branches(kind="sg"), weak=net)
    with pytest.raises(ConfigError, match=r"guidance is 2\.0, but the model has no label for 'no class'"):
        sample(net, Flow(), branches=Branches(kind="cfg+sg"), null_label=None)
    assert sample(net, Flow(), branches=Branches(kind="cfg+sg"), null_label=None, guidance=1.0).isfinite().all()
    net.routing = None
    with pytest.raises(ConfigError, match="a branch of guidance drops tokens, but the model has no routes"):
        sample(net, Flow(), branches=Branches(kind="sg"))
    assert sample(net, Flow(), branches=Branches(kind="ag"), weak=net).isfinite().all()
