"""How steps are timed, counted and recorded."""

import json

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import timing
from benchmarks.common.flops import count_flops
from benchmarks.common.kinds import kind_of
from benchmarks.common.record import Record, compared, options
from benchmarks.common.timing import Timing, alternate, timed
from benchmarks.curve import RATIOS, SMOKE, Layers
from tests.benchmarks.ticks import Ticks
from tread.kernels.attention.cudnn import attend
from tread.routing.cost import LayerShape, plan_cost

CPU = torch.device("cpu")


def test_the_spread_leaves_out_one_block_in_ten():
    found = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 1000.0], steps=22)
    assert (found.low_ms, found.median_ms, found.high_ms) == (2.0, 6.0, 10.0)
    assert (found.blocks, found.steps) == (11, 22)


@pytest.fixture
def ticks(monkeypatch):
    ticks = Ticks()
    monkeypatch.setattr(timing, "time", ticks)
    return ticks


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "a b aaaa b aaaa b aaaa b"),  # a step of each tells how long a block is; that of b is a block itself
        (4.5, "a b aaaa b aaaa b aaaa b aaaa b"),
    ],
)
def test_kinds_of_step_take_turns(ticks, seconds, expected):
    calls = []

    def step(name, took):
        calls.append(name)
        ticks.now += took

    times = alternate({"a": lambda: step("a", 0.1), "b": lambda: step("b", 1.0)}, CPU, seconds=seconds, rounds=3)
    assert "".join(calls) == expected.replace(" ", "")
    assert {name: round(found.median_ms) for name, found in times.items()} == {"a": 100, "b": 1000}
    assert times["a"].steps == calls.count("a") - 1
    assert times["b"].steps == calls.count("b")


def test_time_is_per_step(ticks):
    def step():
        ticks.now += 0.003

    assert [timed(step, count, CPU) for count in (1, 10)] == pytest.approx([3, 3])


def test_counted_flops_are_those_of_the_products():
    linear = nn.Linear(16, 32, bias=False)
    x = torch.randn(8, 16, requires_grad=True)
    forward = 2 * 8 * 16 * 32
    assert count_flops(lambda: linear(x), CPU).total == forward
    assert count_flops(lambda: linear(x).sum().backward(), CPU).total == 3 * forward
    again = count_flops(lambda: checkpoint(lambda t: linear(t).sin(), x, use_reentrant=False).sum().backward(), CPU)
    assert again.total == 4 * forward


def test_attention_is_counted_by_itself_where_torch_counts_it():
    query = torch.randn(2, 4, 8, 16, requires_grad=True)
    linear = nn.Linear(16, 32, bias=False)
    found = count_flops(lambda: linear(attend(query, query, query)).sum().backward(), CPU)
    assert (found.products, found.attention) == (3 * 2 * 64 * 16 * 32, (2 + 5) * 2 * 8 * 8 * 8 * 16)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NNN", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "products"),
        ("triton_poi_fused_gelu_view_11", "compiled"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_kernels_have_a_kind(kernel, kind):
    assert kind_of(kernel) == kind


def test_the_count_is_torchs():
    model = Layers(SMOKE).train()
    x, c = torch.randn(4, 32, SMOKE.width), torch.randn(4, SMOKE.width)

    def step():
        checkpoint(model, x, c, 0.5, use_reentrant=False).sum().backward()

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step()
    assert count_flops(step, CPU).total == counter.get_total_flops() > 0


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.filterwarnings("ignore")
def test_the_curves_ideal_is_what_torch_counts(ratio):
    model, tokens = Layers(SMOKE).train(), 32
    x, c = torch.randn(4, tokens, SMOKE.width), torch.randn(4, SMOKE.width)
    cost = plan_cost(model.plan(ratio), LayerShape(width=SMOKE.width), tokens=tokens)
    counted = [count_flops(lambda given=given: model(x, c, given), CPU).total for given in (None, ratio)]
    assert counted == [4 * cost.dense_flops, 4 * cost.routed_flops]


def test_a_speed_up_is_judged_against_the_flops():
    facts = compared({"median_ms": 30.0}, {"median_ms": 20.0}, 2e12, 1e12)
    assert (facts["speedup"], facts["ideal"], facts["achieved"]) == (1.5, 2.0, 0.75)
    assert facts["routed"]["tflops"] == pytest.approx(50.0)


def opened(tmp_path, *arguments):
    return Record("trial", options("").parse_args(["--smoke", "--out", str(tmp_path / "trial.json"), *arguments]))


def read(tmp_path):
    return json.loads((tmp_path / "trial.json").read_text())["measurements"]


def test_a_failure_costs_itself_alone(tmp_path, capsys):
    record = opened(tmp_path)
    record.measure("breaks", lambda: {"value": 1 // 0}, row="x")
    assert len(read(tmp_path)) == 1  # written before the next one begins
    record.measure("works", lambda: {"value": 2}, row="x")
    broken, fine = read(tmp_path)
    assert (broken["status"], broken["error"].split(":")[0]) == ("failed", "ZeroDivisionError")
    assert "1 // 0" in broken["trace"]
    assert (fine["status"], fine["value"]) == ("ok", 2)
    assert "x | breaks: failed: ZeroDivisionError" in capsys.readouterr().out


def test_nothing_starts_after_the_budget(tmp_path):
    record = opened(tmp_path, "--budget-seconds", "0")
    record.measure("late", lambda: pytest.fail("it ran"))
    assert read(tmp_path)[0]["status"] == "skipped"


def test_a_result_says_where_it_comes_from(tmp_path):
    opened(tmp_path).measure("one", dict)
    facts = json.loads((tmp_path / "trial.json").read_text())
    assert facts["command"].startswith("python -m benchmarks.trial")
    assert facts["machine"]["torch"] in (torch.__version__, torch.__version__.split("+")[0])
