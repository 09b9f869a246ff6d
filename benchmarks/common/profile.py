"""Profile the overhead of routing in a step, and host-device synchronisations.

- Routing in a forward runs outside compiled layers, through few functions: they are wrapped in profiler ranges, and the
  kernels launched inside count as routing's. In backward, the kernels of gather's and restore's autograd nodes count;
  nothing else in a model of compiled layers creates such nodes.
- A wait is any CUDA call that blocks the host, or a device-to-host copy, within a step.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.common.record import Facts
from benchmarks.common.steps import Steps
from benchmarks.common.timing import alternate
from tread.routing import handle as handle_module
from tread.routing import state as state_module
from tread.routing.handle import Handle
from tread.routing.state import State

STEPS = 3
RANGE = "tread."
OUTER = ("begin", "enter", "exit", "side")
"""Ranges that do not overlap; `sort`, `gather` and `restore` are nested in them."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
BACKWARD = "autograd::engine::evaluate_function: "
ROUTING_NODES = ("_TakenBackward", "ScatterBackward0", "ScatterBackward1", "CloneBackward0", "GatherBackward0")


@contextmanager
def ranges() -> Iterator[None]:
    """Name the ranges of routing."""
    patches = [
        patch.object(Handle, "begin", _named("begin", Handle.begin)),
        patch.object(State, "enter", _named("enter", State.enter)),
        patch.object(State, "exit", _named("exit", State.exit)),
        patch.object(State, "side", _named("side", State.side)),
        patch.object(state_module, "gather", _named("gather", state_module.gather)),
        patch.object(state_module, "restore", _named("restore", state_module.restore)),
        patch.object(handle_module, "select", _named("sort", handle_module.select)),
    ]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with record_function(RANGE + name):
            return function(*args, **kwargs)

    return inside


def profile_routing(steps: Steps) -> Facts:
    """The share of routing in a routed step: device time of its kernels over the time of the step."""
    on_gpu = steps.device.type == "cuda"
    times = alternate({"routed": steps.routed}, steps.device, seconds=2.0 if on_gpu else 0.0, rounds=3 if on_gpu else 1)
    step_ms = times["routed"].median_ms
    with ranges():
        events = events_of(steps.routed, on_gpu)
    forward = {name: _milliseconds(events, RANGE + name, on_gpu) for name in (*OUTER, "sort", "gather", "restore")}
    backward = {name: _milliseconds(events, BACKWARD + name, on_gpu) for name in ROUTING_NODES}
    host = {name: _milliseconds(events, RANGE + name, False) for name in OUTER}
    routing_ms = sum(forward[name] for name in OUTER) + sum(backward.values())
    waits = count_waits(events)
    warned = warned_waits(steps.routed) if on_gpu else []
    return {
        "step_ms": step_ms,
        "spread_ms": [times["routed"].low_ms, times["routed"].high_ms],
        "routing_ms": round(routing_ms, 4),
        "share": round(routing_ms / step_ms, 5),
        "device_ms": {"forward": forward, "backward": backward},
        "host_ms": host,
        "busy_ms": round(_busy(events) / STEPS, 3),
        "top_kernels": _top(events),
        "waits": waits,
        "waits_at": warned,
        "summary": {"share": f"{routing_ms / step_ms:.2%} of {step_ms:.1f} ms,", "waits": sum(waits.values())},
    }


def events_of(step: Callable[[], Any], on_gpu: bool) -> list[Any]:
    """The profiler's events of STEPS steps."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            with record_function(RANGE + "step"):
                step()
        if on_gpu:
            torch.cuda.synchronize()
    return list(profiler.events() or [])


def _milliseconds(events: list[Any], name: str, on_gpu: bool) -> float:
    """Milliseconds per step of the kernels launched inside a range, or without a GPU of the range itself."""
    matching = [event for event in events if event.name == name and event.device_type == DeviceType.CPU]
    total = sum(event.device_time_total if on_gpu else event.cpu_time_total for event in matching)
    return round(total / 1e3 / STEPS, 4)


def kernels_of(events: list[Any]) -> list[Any]:
    """The kernel events among the profiler's events."""
    return [
        event
        for event in events
        if event.device_type == DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith((RANGE, "Optimizer.", "Torch-Compiled", "## Call"))
    ]


def _busy(events: list[Any]) -> float:
    """Milliseconds in which the device was busy, over all steps."""
    return sum(event.time_range.elapsed_us() for event in kernels_of(events)) / 1e3


def _top(events: list[Any], count: int = 25) -> dict[str, dict[str, float]]:
    """The kernels that take most of the step: milliseconds and launches of one step."""
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in kernels_of(events):
        times[event.name[:120]] += event.time_range.elapsed_us()
        launches[event.name[:120]] += 1
    return {
        name: {"ms": round(time / 1e3 / STEPS, 3), "launches": round(launches[name] / STEPS, 1)}
        for name, time in times.most_common(count)
    }


def count_waits(events: list[Any]) -> dict[str, int]:
    """Calls inside the steps that block the host, and copies from the device, by name."""
    spans = [
        event.time_range for event in events if event.name == RANGE + "step" and event.device_type == DeviceType.CPU
    ]
    found: Counter[str] = Counter()
    for event in events:
        if event.device_type == DeviceType.CPU:
            inside = any(span.start <= event.time_range.start <= span.end for span in spans)
            if inside and event.name in WAITS:
                found[event.name] += 1
        elif event.name.startswith("Memcpy DtoH"):
            found["Memcpy DtoH"] += 1
    return dict(found)


def host_waits(step: Callable[[], Any]) -> dict[str, int]:
    """The waits in STEPS steps on a GPU; a training loop should have none."""
    return count_waits(events_of(step, on_gpu=True))


def warned_waits(step: Callable[[], Any]) -> list[str]:
    """Where in the code torch saw the host wait during one step: `file:line: what`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # enabling sync debug mode warns that it is a prototype
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{one.filename}:{one.lineno}: {one.message}" for one in caught if "synchroniz" in str(one.message)]
