"""The scripts at tiny size, the table they fill, and the runner that survives them."""

import importlib
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
import torch

import tread
from benchmarks import all as runner
from benchmarks import buckets, curve, dit, families, flux, hooks, loop, offload, plot, recipes, sd3, sharded, wan
from benchmarks.common.profile import OUTER, host_waits, profile_routing, ranges, warned_waits
from benchmarks.common.targets import ROWS, best, table, verdict
from pages.subjects import Subject
from tests.benchmarks.ticks import Ticks
from tread.finetune.families import TUNE_FAMILIES
from tread.finetune.model.adapters import add_adapter
from tread.routing.plan import RoutePlan
from tread.routing.state import State

pytestmark = pytest.mark.filterwarnings("ignore")


def measured(script, tmp_path, *arguments):
    path = tmp_path / "result.json"
    assert script.main(["--smoke", "--out", str(path), *arguments]) == 0
    found = json.loads(path.read_text())["measurements"]
    assert [one.get("trace") for one in found if one["status"] != "ok"] == []
    return found


@pytest.mark.parametrize(("script", "rows"), [(flux, ["flux-checkpointed", "flux"]), (sd3, ["sd3"])])
def test_lora_steps(script, rows, tmp_path):
    found = measured(script, tmp_path, "--variants", "eager")
    assert [one["row"] for one in found] == ["set-up", *rows]
    for one in found[1:]:
        assert 1 < one["ideal"] < 2
        assert one["routed"]["median_ms"] > 0
        assert one["routed_tflop"] <= one["dense_tflop"]


def test_steps_with_layers_in_host_memory(tmp_path):
    found = measured(offload, tmp_path, "--eager", "--rows", "flux-512-8")
    assert found[0]["summary"]["precision"] == "int4"
    resident, *offloaded = (one for one in found if one["row"] != "set-up")
    assert [one["link_gb_s"] for one in offloaded] == list(offload.LINKS)
    for one in offloaded:
        assert one["summary"]["layers"] == 7
        assert one["summary"]["ratio"] > 0
        assert one["flops"] == resident["flops"]
        assert one["routed"]["loss"] > 0


@pytest.mark.contract
def test_steps_of_a_family(tmp_path):
    """By the family's own `predict`, at its real width."""
    (found,) = measured(families, tmp_path, "--models", "pixart_sigma")
    assert (found["row"], found["family"]) == ("family-pixart_sigma", "pixart_sigma")
    assert found["shapes"]["image_tokens"] == 4096
    assert 1 < found["ideal"] < 2


def test_every_family_has_a_row_and_fits_the_device():
    """The table of docs/models.md quotes one for each; an H200 has 139 GiB."""
    assert {line.family for line in families.MODELS.values()} == set(TUNE_FAMILIES)
    for line in families.MODELS.values():
        assert 0.5 < families.weights_gib(Subject(line)) < 80, line.title


@pytest.mark.parametrize("name", recipes.LINES)
def test_a_recipe_for_one_card_is_measured_as_it_stands(name):
    """And its first lines say what a step takes; its routes fit the shallow model that is compiled ahead."""
    case = recipes.case_of(name)
    text = (recipes.FOLDER / f"{name}.yaml").read_text()
    assert re.search(r"for \d+ GB: a step (took|takes) [\d.]+ GiB", " ".join(text.replace("#", " ").split()))
    assert f"base_model_precision: {case.base}\n" in text
    assert case.references == (2 if "edit" in name else 0)
    assert case.routes is not None
    RoutePlan.from_config(families.shortened(case.routes)).resolve(6)


NARROW = {
    "cosmos3": {
        **{"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"intermediate_size": 64, "vocab_size": 8, "rope_axes_dim": [4, 2, 2]},
    },
    **{name: {"num_attention_heads": 2} for name in ("hidream", "hunyuanvideo", "qwen_image21", "qwen_layered")},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.contract] * (name != "hunyuanvideo")) for name in NARROW]
)
def test_a_narrow_step(name):
    """A routed forward and backward of the row's own inputs, shallow and narrow, in float32."""
    line = replace(families.MODELS[name], config={**families.MODELS[name].config, **NARROW[name]})
    subject, shape = families.shape_of(families.Case(line=line), shallow=True, smoke=True)
    model = shape.model().train()
    add_adapter(model, kind="standard", rank=2, alpha=2, targets=subject.family.lora_targets, seed=0)
    handle = tread.attach(model, {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}]})
    assert shape.loss is not None
    shape.loss(model, shape.inputs(torch.device("cpu")), 0).backward()
    assert handle.kept_share < 0.9
    moved = [p.grad is not None and p.grad.abs().max() > 0 for n, p in model.named_parameters() if "lora_B" in n]
    assert sum(moved) >= len(moved) - 2, "text of the last layer aside"


@pytest.mark.parametrize("name", families.MODELS)
def test_shallow_models_have_few_layers(name):
    subject, _ = families.shape_of(families.Case(line=families.MODELS[name]), shallow=True, smoke=False)
    depths = {stack: len(subject.model.get_submodule(stack)) for stack in subject.stacks}
    assert families.shallow_config(subject, depths)
    with torch.device("meta"):
        shallow = subject.cls(**{**subject.line.config, **families.shallow_config(subject, depths)})
    assert sum(len(shallow.get_submodule(stack)) for stack in subject.stacks) <= 8


@pytest.mark.contract
def test_steps_by_graphs_tell_kinds_of_kernels(tmp_path):
    kinds = measured(sd3, tmp_path, "--variants", "graphs")[-1]
    assert kinds["row"] == "kinds"
    assert kinds["kinds"]["dense"].keys() == {"attention", "products", "compiled", "other"}
    assert kinds["flops"]["dense"]["products"] > kinds["flops"]["routed"]["products"] > 0


@pytest.mark.parametrize("ways", [("eager",), pytest.param(("call", "eager"), marks=pytest.mark.contract)])
def test_anyones_loop(ways, tmp_path):
    """The call for speed compiles, which tests/attach/test_fast.py does always."""
    found = measured(loop, tmp_path, "--ways", *ways, "--rows", "plain", "--models", "qwen")
    assert [(one["row"], one["name"]) for one in found[1:]] == [("loop-qwen-plain", way) for way in ways]
    assert all(1 < one["ideal"] < 2 for one in found[1:])


@pytest.mark.contract
def test_sharded_layouts_and_their_saves(tmp_path, capsys):
    none, fsdp, offload = measured(sharded, tmp_path, "--folder", str(tmp_path / "not" / "there"))
    said = capsys.readouterr().out
    assert [line.partition(" ... ")[0] for line in said.splitlines() if line.startswith("fsdp |")] == [
        "fsdp | make the model",
        "fsdp | compile and warm up (1 steps)",
        "fsdp | time steps",
        *(f"fsdp | save {number} of 4" for number in (1, 2, 3, 4)),
    ]
    assert list((tmp_path / "not" / "there").iterdir()) == []
    assert none["routed"]["loss"] == pytest.approx(fsdp["routed"]["loss"], rel=2e-2)
    assert fsdp["routed"]["loss"] == pytest.approx(offload["routed"]["loss"], rel=1e-4)
    for one in (fsdp, offload):
        assert all(0 < save["stall_ms"] < save["written_ms"] for save in one["saves"])
        assert {save["gib"] for save in one["saves"]} == {none["saves"][0]["gib"]}


@pytest.mark.contract  # tests/attach/test_shapes.py has the claim, this the script
def test_buckets_settle(tmp_path):
    found = measured(buckets, tmp_path, "--models", "z-image", "--shapes", "1", "--rounds", "2")
    assert found[0]["settled"]
    assert found[0]["rounds"][0]["compilations"] > 1


def test_anyones_loop_calls_nothing_private():
    """Beside the trainer's row, which is the product's own."""
    lines = Path(loop.__file__).read_text().splitlines()
    assert [line for line in lines if "tread" in line and "import" in line.split("#")[0].split()] == ["import tread"]


def test_checkpointed_video_steps(tmp_path):
    assert measured(wan, tmp_path, "--variants", "eager")[1]["row"] == "wan-checkpointed"


def test_pretraining_steps_and_the_share_of_routing(tmp_path):
    step, share = measured(dit, tmp_path, "--variants", "blocks")
    assert step["dense"]["images_per_second"] == pytest.approx(2e3 / step["dense"]["median_ms"], rel=0.01)
    assert share["row"] == "routing"
    forward, backward = share["device_ms"]["forward"], share["device_ms"]["backward"]
    assert min(forward["gather"], forward["restore"], backward["_TakenBackward"]) > 0
    assert share["routing_ms"] == pytest.approx(sum([*(forward[name] for name in OUTER), *backward.values()]), abs=1e-4)
    assert share["share"] == pytest.approx(share["routing_ms"] / share["step_ms"], rel=0.01)


def test_the_curve_and_its_picture(tmp_path):
    found = measured(curve, tmp_path, "--figure", str(tmp_path / "curve.png"))
    assert [one["shapes"]["tokens"] for one in found] == [32, 128]
    ideals = [point["ideal"] for point in found[0]["points"].values()]
    assert ideals == sorted(ideals)
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_the_curve_is_drawn_from_the_results_of_several_jobs(tmp_path):
    results = Path(runner.__file__).parent / "results" / "h200-graphs.json"
    assert plot.main([str(results), str(tmp_path / "curve.png")]) == 0
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_the_cost_of_hooks(tmp_path, monkeypatch):
    """By a clock that counts tokens: the stack is timed as it is, then attached, routed and dense."""
    ticks, idle = Ticks(), hooks.Idle.forward

    def count(layer, hidden_states, *others, **named):
        ticks.now += hidden_states.shape[1] / 1e6
        return idle(layer, hidden_states, *others, **named)

    monkeypatch.setattr(hooks.Idle, "forward", count)
    monkeypatch.setattr(hooks, "time", ticks)
    routed = (2 * 8 + 3 * 4 + 8) / 6  # layers 2 to 4 of six see half of the eight tokens
    for found in measured(hooks, tmp_path):
        assert (found["plain_us"], found["attached_dense_us"]) == (8, 8)
        assert found["attached_routed_us"] == pytest.approx(routed, abs=0.01)
        assert found["routing_us"] == pytest.approx(routed - 8, abs=0.01)


def test_ranges_leave_no_trace():
    before = State.enter, State.exit, State.side
    with ranges():
        assert State.enter is not before[0]
    assert (State.enter, State.exit, State.side) == before


def result(key, dense, routed, ideal, *, gib=None, images=None, name="compiled"):
    speed = {} if images is None else {"images_per_second": images}
    speedup = dense / routed

    def timing(ms):
        return {"median_ms": ms, "low_ms": ms, "high_ms": ms, "peak_gib": gib} | speed

    return {
        "row": key,
        "name": name,
        "status": "ok",
        "dense": timing(dense),
        "routed": timing(routed),
        "speedup": speedup,
        "ideal": ideal,
        "achieved": speedup / ideal,
    }


def test_verdicts():
    rows = {row.key: row for row in ROWS}
    assert verdict(rows["flux"], result("flux", 380, 190, 1.97, gib=31)) == "hit"
    assert verdict(rows["flux"], result("flux", 380, 196, 1.97, gib=33)) == "MISS: time, memory"
    assert verdict(rows["flux"], result("flux", 300, 190, 1.97, gib=31)) == "MISS: of ideal"
    assert verdict(rows["dit-xl"], result("dit-xl", 380, 224, 1.7, images=1140)) == "MISS: speed"
    assert verdict(rows["dit-b-float8"], result("dit-b-float8", 80, 50, 1.4, images=5000)) == "reported"


def test_the_table_takes_the_fastest_that_worked():
    failed = {"row": "flux", "name": "graphs", "status": "failed", "error": "x"}
    slow, fast = (result("flux", 400, ms, 1.97, gib=31, name=name) for ms, name in ((210, "slow"), (190, "fast")))
    row = next(row for row in ROWS if row.key == "flux")
    assert best(row, [slow, failed, fast]) is fast
    too_large = result("flux", 400, 180, 1.97, gib=35)
    assert best(row, [slow, too_large, fast]) is fast, "the fastest of those that fit"
    assert best(row, [too_large]) is too_large
    lines = table([slow, {**fast, "beyond": ["flash attention forced"]}, {**failed, "row": "sd3"}]).splitlines()
    assert next(line for line in lines if "| fast (flash attention forced) |" in line).endswith("| hit |")
    assert sum(line.startswith("- ") for line in lines) == 3  # the slow and the failed one are not hidden
    assert "hit" not in table([slow, fast], judged=False)
    assert next(line for line in lines if "SD3.5" in line).endswith("| graphs failed |")
    assert next(line for line in lines if "Wan" in line).endswith("| not run |")


def test_a_job_that_breaks_costs_itself_alone(tmp_path, monkeypatch, capfd):
    jobs = (runner.Job("gone", "no_such_script"), runner.Job("hooks", "hooks"))
    monkeypatch.setattr(runner, "JOBS", jobs)
    assert runner.main(["--smoke", "--out", str(tmp_path), "--name", "trial"]) == 1
    gone, fine = json.loads((tmp_path / "smoke-trial.json").read_text())["jobs"]
    assert gone["exit_code"] == 1
    assert "No module named" in gone["log_tail"]
    assert (fine["exit_code"], len(fine["measurements"])) == (0, 2)
    assert "| not run |" in (tmp_path / "smoke-trial.md").read_text()


def test_a_smoke_run_leaves_variants_out_unless_they_are_named(tmp_path, monkeypatch, capfd):
    jobs = (runner.Job("hooks", "hooks"), runner.Job("gone", "no_such_script", main=False))
    monkeypatch.setattr(runner, "JOBS", jobs)
    for named, expected in ([], ["hooks"]), (["--jobs", "gone"], ["gone"]):
        code = runner.main(["--smoke", "--out", str(tmp_path), "--name", "trial", *named])
        done = json.loads((tmp_path / "smoke-trial.json").read_text())["jobs"]
        assert [job["job"] for job in done] == expected
        assert code == len(named) // 2, "a variant that was named counts"


def test_a_job_that_hangs_is_ended():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    assert runner._finish(process, 0.0) == "ended: out of time"
    assert process.returncode == -signal.SIGKILL


def test_every_job_names_a_script_and_variants_that_exist():
    for job in runner.JOBS:
        script = importlib.import_module(f"benchmarks.{job.script}")
        if "--variants" in job.arguments:
            named = takewhile(
                lambda word: not word.startswith("--"), job.arguments[job.arguments.index("--variants") + 1 :]
            )
            assert set(named) <= {variant.name for variant in script.VARIANTS}, job.name


@pytest.mark.gpu
def test_waits_are_seen():
    x = torch.ones(4, device="cuda")
    assert host_waits(lambda: x.sum().item())
    assert warned_waits(lambda: x.sum().item())
    assert not host_waits(lambda: x.sum())


@pytest.mark.gpu
@pytest.mark.slow
def test_no_step_of_the_loop_waits_for_the_device():
    device = torch.device("cuda")
    with dit.dit_steps("tiny", dit.VARIANTS[0], device, batch=8, depth=dit.SHALLOW) as steps:
        steps.warm_up()
        found = profile_routing(steps)
    assert found["waits"] == {}, found["waits_at"]
