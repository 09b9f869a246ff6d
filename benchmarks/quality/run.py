"""The experiment: the remaining runs, and a worker process that makes them one by one.

- A worker process makes as many runs as fit, so that imports and compiled code serve all of them. If it dies, its
  current run is recorded as failed and another worker continues with the rest.
- A run that would not fit into the remaining time, compilation included, is not started.
- A run whose compilation failed is recorded as failed: its speed would be that of eager code.
- A routed run that is looked at where a dense one of its seed and seconds ended comes after that one.
- A run that is killed leaves its validation losses: results are written at each of them, with the clock stopped.
- A run whose ratio falls at its end must know its steps beforehand: they follow from the speeds of the dense
  and the routed run.
"""

import gc
import json
import os
import subprocess
import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.common.record import Facts, machine
from benchmarks.common.timing import GIB
from tread.kernels.compiling import compile_layers
from tread.models import DiT
from tread.pretrain.build import build_model
from tread.training.job import make_accelerator
from tread.training.loop import settling
from tread.training.session import Session

from .arms import ENDLESS, SCALES, UNGUIDED, Arm, Scale, arm_of, config_of
from .jobs import (
    Job,
    Kind,
    Spec,
    Ways,
    compile_seconds,
    expected_seconds,
    in_order,
    kind_of,
    looks,
    missing_ways,
    weights_file,
)
from .judge import Judge, draw, load_judge_network, read_reference_facts
from .results import NEAREST, Results, snapshot
from .training import Clock, Stops, Trial, anneal, check_fast, race, save_average, warm_up


def run(spec: Spec) -> bool:
    """Make the runs that fit; True when all are done."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str((Path(spec.work) / "inductor").resolve())}
    scale, folder, tried = SCALES[spec.scale], Path(spec.work), set[str]()
    read_reference_facts(folder)  # a missing reference fails here, not in every worker

    def to_do() -> list[Job]:
        results = spec.results()
        return [job for job in spec.jobs if expected_seconds(job, scale, results, folder)]

    while left := [job for job in to_do() if job.name not in tried]:
        current = folder / "current"
        current.unlink(missing_ok=True)
        worker = subprocess.run(
            [sys.executable, "-m", "benchmarks.quality", "work"],
            input=json.dumps(asdict(replace(spec, jobs=tuple(left)))),
            text=True,
            env=environment,
            check=False,
        )
        if worker.returncode == 0:  # all runs are done, or all that fit into the time
            break
        name = current.read_text() if current.is_file() else left[0].name
        tried.add(name)
        results, error = spec.results(), f"the process ended with {worker.returncode}"
        entry = results.runs.get(name) or blank(next(job for job in left if job.name == name))
        if entry["status"] == "begun":  # the worker died without recording an error
            results.write(name, entry | {"status": "failed", "error": error})
        print(f"{name}: {entry.get('error', error)}", flush=True)
    return not to_do()


def blank(job: Job) -> Facts:
    """The entry of a run that has measured nothing yet."""
    return {
        "status": "begun",
        "arm": asdict(arm_of(job.arm)),
        "seed": job.seed,
        "seconds": job.seconds,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else None,
        "forwards_per_second": None,
        "curve": [],
        "snapshots": [],
    }


def work(spec: Spec) -> int:
    """The worker: make the runs one after the other; 1 where one failed."""
    scale, folder = SCALES[spec.scale], Path(spec.work)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.accumulated_recompile_limit = 1024
    results, compiled = spec.results(), set[Kind]()
    results.facts |= {"machine": machine() | {"scale": asdict(scale)}, "data": read_reference_facts(folder)}
    judge = Judge(folder, load_judge_network(folder, device, smoke=spec.scale == "smoke"), scale)
    for job in in_order(spec.jobs, results):
        if not (needed := expected_seconds(job, scale, results, folder)):
            continue
        needed += compile_seconds(job, scale, compiled)
        left = spec.ends - time.time()
        if needed > left:
            print(f"{job.name}: needs about {needed:.0f} s and {max(left, 0):.0f} are left", flush=True)
            continue
        (folder / "current").write_text(job.name)
        compiled.add(kind_of(arm_of(job.arm)))
        done = results.is_done(job.name)
        entry = results.runs[job.name] if done else blank(job)
        try:
            make = add_ways if done else make_run
            make(arm_of(job.arm), job, scale, folder, results, judge, entry)
        except Exception as error:  # recorded; a fresh process continues, since the device may be unusable
            trace = traceback.format_exc()
            print(trace, flush=True)
            if entry["status"] != "done":
                failed = {"status": "failed", "error": f"{type(error).__name__}: {error}", "trace": trace}
                results.write(job.name, entry | failed)
            return 1
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


def steps_of(arm: Arm, job: Job, results: Results) -> int | None:
    """The steps of a run that must know them: as many as take `seconds`, with the dense share at the end."""
    if job.steps is not None or not arm.needs_steps:
        return job.steps
    routed = 1 - arm.cooldown if arm.is_routed else 0.0
    shares = {name: share for name, share in (("routed", routed), ("dense", 1 - routed)) if share}
    entries = {name: results.done(name, job.seed) for name in shares}
    speeds = {name: entry["steps_per_second"] for name, entry in entries.items() if entry is not None}
    if len(speeds) < len(shares):
        raise ValueError(f"{arm.name} needs the speeds of {' and '.join(shares)}: run those first, or give --steps")
    return round(job.seconds / sum(share / speeds[name] for name, share in shares.items()))


def steps_of_dense(job: Job, results: Results) -> int | None:
    """The step at which a routed run is also evaluated: the final step of the dense run of equal seconds."""
    if job.equal_to is None:
        return None
    dense = results.done(job.equal_to, job.seed, job.seconds)
    if dense is None:
        raise ValueError(
            f"{job.arm} needs the run {job.equal_to} of seed {job.seed} and {job.seconds:g} s: run that first"
        )
    return dense["steps"]


def make_run(arm: Arm, job: Job, scale: Scale, folder: Path, results: Results, judge: Judge, entry: Facts) -> None:
    """Train and evaluate one run; `entry` is filled and saved on the way."""
    began = time.monotonic()
    steps, equal_steps = steps_of(arm, job, results), steps_of_dense(job, results)
    config = config_of(arm, job.seed, scale, folder / "data", steps=ENDLESS if steps is None else steps)
    accelerator = make_accelerator(config)
    task = Trial(config, accelerator, folder, scale)
    session = Session(task, config, accelerator)
    task.model.train()
    stops = Stops(seconds=job.seconds, steps=steps, marks=job.marks, equal_steps=equal_steps)
    ways = looks(arm, job)
    entry |= {
        "settings": {
            "optimizer": asdict(config.optimizer),
            "ema": asdict(config.ema),
            "tread_config": arm.tread_config(),
        },
        "ideal_speedup": arm.ideal_speedup(config, (32 // scale.patch) ** 2),
    }
    warmed = warm_up(session, task)
    start = time.monotonic()
    with accelerator.autocast():
        draw(task.model, task.objective, UNGUIDED, scale.sample_batch, scale, weak=None, device=accelerator.device)
    check_fast(session.fast)
    entry["warm_up_seconds"] = round(warmed + time.monotonic() - start, 1)
    clock = Clock(accelerator.device)
    print(f"== {job.name}: {task.summary()}; warm-up {entry['warm_up_seconds']} s", flush=True)

    def so_far() -> None:
        check_fast(session.fast)
        entry.update(
            steps=clock.step,
            train_seconds=round(clock.seconds, 3),
            steps_per_second=round(clock.step / clock.seconds, 3),
            images_per_second=round(clock.step * scale.batch / clock.seconds, 1),
            peak_gib=round(clock.peak_bytes / GIB, 2),
            wall_seconds=round(time.monotonic() - began, 1),
        )
        results.write(job.name, entry)

    def validate() -> None:
        if entry["curve"] and entry["curve"][-1]["steps"] == clock.step:
            return
        with session.averaged():
            loss = task.validate()["val_loss"]
        chunk = {"seconds": round(clock.seconds, 3), "steps": clock.step, "train_loss": clock.losses[-1]}
        entry["curve"].append(chunk | {"val_loss": loss})
        so_far()

    def look(at: str, due: float | None) -> None:
        annealed = at == "annealed"
        if not annealed:
            validate()
        with session.averaged():
            by_time = task.loss_by_time()
            loss = task.validate()["val_loss"] if annealed else entry["curve"][-1]["val_loss"]
        # only the first mark's weights are saved: the weaker model guides better
        if arm.is_guided and (at == "end" or (at == "mark" and snapshot(entry, at) is None)):
            save_average(session, weights_file(folder, job, at))
        weak = _earlier(task, folder, job, ways[at])
        with session.ema.applied() if session.ema else nullcontext():
            found, shown = judge.judge(task.model, task.objective, ways[at], weak=weak, autocast=accelerator.autocast)
        seconds = found["unguided"]["sampling_seconds"]
        entry["forwards_per_second"] = round(found["unguided"]["count"] * scale.solver_steps / max(seconds, 1e-6), 1)
        seen = {"at": at, "due": due, "seconds": round(clock.seconds, 3), "steps": clock.step, "val_loss": loss}
        seen |= {"val_loss_by_time": by_time, "samples": found}
        if annealed:
            entry["annealed"] = seen
        else:
            entry["snapshots"].append(seen)
        grid = f"{job.name}-{at}" if at != "mark" else f"{job.name}-{at}-{due:g}s"
        results.write_grid(grid, shown)
        results.write_grid(f"{grid}{NEAREST}", judge.nearest_in_training(shown))
        if not annealed:  # the entry's steps, seconds and speed are those of the constant rate
            so_far()
        words = distances(found, judge.extractor.distance)
        speed = f"sampling {entry['forwards_per_second']:,.0f} forwards/s, {time.monotonic() - began:.0f} s so far"
        losses = f"loss by time {', '.join(f'{loss:.4f}' for loss in by_time)}"
        print(f"{job.name} {at}: {clock.step} steps in {clock.seconds:.1f} s, {words}; {losses}; {speed}", flush=True)

    with settling() as settle:
        settle()
        race(session, clock, stops, scale, look, validate)
        entry["status"] = "done"
        so_far()
        if job.anneal:
            anneal(session, clock, job.anneal, scale)
            look("annealed", None)
            results.write(job.name, entry)
    accelerator.free_memory()


def add_ways(arm: Arm, job: Job, scale: Scale, folder: Path, results: Results, judge: Judge, entry: Facts) -> None:
    """Sample a finished run with the guidance settings that it lacks."""
    config = config_of(arm, job.seed, scale, folder / "data", steps=ENDLESS)
    accelerator = make_accelerator(config)
    task = Trial(config, accelerator, folder, scale)
    task.model.load_state_dict(load_file(weights_file(folder, job, "end")))
    task.make_fast()
    ways = missing_ways(job, results, folder)
    weak = _earlier(task, folder, job, ways)
    found, _ = judge.judge(task.model, task.objective, ways, weak=weak, autocast=accelerator.autocast)
    end = snapshot(entry, "end")
    assert end is not None
    end["samples"] |= found
    results.write(job.name, entry)
    print(f"{job.name} end: {distances(found, judge.extractor.distance)}", flush=True)


def distances(found: Facts, name: str) -> str:
    """The Frechet distance of each way to sample, for the log."""
    return ", ".join(f"{name} {figures[name]:.2f} ({way})" for way, figures in found.items())


def _earlier(task: Trial, folder: Path, job: Job, ways: Ways) -> DiT | None:
    """The model of the same run at its first mark, if a guidance setting needs it."""
    if not any(guide.branches.needs_weak for guide in ways):
        return None
    shape, classes = task.dataset.shape, task.dataset.num_classes
    model = build_model(task.config.model, shape, classes, checkpointing=False).to(task.pixels.device)
    model.load_state_dict(load_file(weights_file(folder, job, "mark")))
    if task.handle is not None:
        model.route(task.handle.plan)
    if task.config.train.compile:
        compile_layers(list(model.blocks), shapes=1)
    return model.eval()
