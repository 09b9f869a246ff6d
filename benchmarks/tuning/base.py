"""The base of the experiment: trained dense on the eight classes that no arm is tuned on.

It goes on where an earlier call stopped. The averaged weights are what the arms start from.
"""

from pathlib import Path

import torch

from benchmarks.common.record import Facts
from tread.files import atomic_write
from tread.training.optimizers.ema import EMA

from .arms import Arm
from .experiment import Experiment
from .plan import BASE, BASE_SECONDS
from .results import Results
from .training import Run

CHUNK = 50
"""Steps between two looks at the clock."""
REPORT_SECONDS = 60.0
"""Training between two validation losses, each followed by a checkpoint."""


def train_base(experiment: Experiment, results: Results, seconds: float) -> Path | None:
    """The file of the base's averaged weights; None if the budget ended before so many seconds of training."""
    done = experiment.work / BASE
    unfinished = done.with_suffix(".unfinished.pt")
    if done.is_file():
        return done
    net = experiment.network("full")
    run = Run(net, Arm.parse("full-dense").plan(1), experiment.trained, experiment.scale, dense=True, seed=0)
    average = EMA(net, decay=0.9995, warmup=10)
    run.warm_up()
    curve: list[tuple[int, float, float]] = []
    if unfinished.is_file():
        state = torch.load(unfinished, weights_only=True, map_location=experiment.device)
        net.load_state_dict(state["net"])
        run.optimizer.load_state_dict(state["optimizer"])
        average.averages = state["averages"]
        run.step, run.seconds, curve = state["step"], state["seconds"], state["curve"]

    def write() -> None:
        state = {"net": net.state_dict(), "optimizer": run.optimizer.state_dict(), "averages": average.averages}
        save_whole(state | {"step": run.step, "seconds": run.seconds, "curve": curve}, unfinished)

    reported = run.seconds
    while run.seconds < seconds and experiment.left > BASE_SECONDS:
        run.train(CHUNK if experiment.scale.compile else 2, experiment.scale.base_rate, average.update)
        if run.seconds - reported >= REPORT_SECONDS:
            reported = run.seconds
            with average.applied():
                curve.append((run.step, run.seconds, run.validation_loss(experiment.held_out)))
            print(f"base: {run.step} steps in {run.seconds:.0f} s, loss {curve[-1][2]:.5f}", flush=True)
            write()
    if run.seconds < seconds:
        write()
        print(f"base: {run.seconds:.0f} of {seconds:.0f} s; {experiment.left:.0f} s left", flush=True)
        return None
    with average.applied():
        facts = {"steps": run.step, "seconds": run.seconds, "parameters": sum(p.numel() for p in net.parameters())}
        facts |= {"val_loss": run.validation_loss(experiment.held_out), "curve": curve, "samples": {}}
        save_whole(net.state_dict(), done)
        experiment.show_base(run, results.path.with_suffix(".png"))
        results.save("base", facts)
    run.close()
    unfinished.unlink(missing_ok=True)
    return done


def save_whole(state: Facts, path: Path) -> None:
    """Write a file that is whole or not there, whenever the process is killed."""
    with atomic_write(path) as file:
        torch.save(state, file)
