"""The stages of a tuning: time, sensitivity, search, finalists, verification, and what is written of them."""

import gc
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from tread.autotune.cost import Cost, Routes, fit, key_of, one_window, ratios_of, routes_of
from tread.autotune.finalists import find_finalists, measured_gap, measured_speedup, predicted, time_beside_dense
from tread.autotune.goal import Options
from tread.autotune.jobs.job import Job, TrainedJob
from tread.autotune.measure import (
    Budget,
    Timer,
    measure_kept,
    measure_losses,
    measure_pairs,
    measure_seconds,
    stored_losses,
)
from tread.autotune.output import text
from tread.autotune.output.page import write_page
from tread.autotune.rules import RATIOS
from tread.autotune.search import Plan, Window, front
from tread.autotune.sensitivity import check_gaps, gap
from tread.autotune.store import FILE, Store
from tread.autotune.subject import LEVELS, Subject
from tread.autotune.verify import DENSE, Arm, check_validation, standing, unplanned, verify
from tread.errors import ConfigError
from tread.files import write_text
from tread.training.record import origin

FAR_OFF = 0.1
"""Relative error of the fit, of a predicted speed-up, or between the times of verifying runs, from which on the command
warns."""
CONFIG_FILE = "tread_config.json"


class Tuning:
    """The stages of a tuning and their shared state."""

    def __init__(
        self, options: Options, job: Job, folder: Path, device: torch.device, verified: TrainedJob | None
    ) -> None:
        self.options, self.job, self.folder, self.device, self.verified = options, job, folder, device, verified
        start = origin(device)
        identity = job.identity() | {"device": start["device"], "torch": start["versions"].get("torch")}
        self.store = Store(folder, identity | {"levels": list(LEVELS)}, start)
        if verified is not None:
            check_validation(verified, self.store)
        self.store.write()
        self.timed: dict[str, Any] = {}
        """The plans of the fit, with what was timed and what is predicted."""
        self.notes: list[str] = []
        if device.type == "cpu":
            self._note(text.ON_A_CPU)

    def run(self, timer: Timer, budget: Budget) -> None:
        """See `autotune`."""
        subject = Subject(self.job.open(self.folder, self.options.ratios))
        print(self._opening(subject))
        ratios = self._ratios(subject)
        cost = self._cost(subject, ratios, timer, budget)
        losses = self._losses(subject, ratios, cost, budget)
        plans = self._search(subject, cost, losses)
        ordered = self.options.goal.ordered(plans, cost.seconds(()))
        result = self._result(subject, cost, losses, plans)
        if not ordered:
            self._unreached(result, result["front"])
        result["finalists"] = self._finalists(subject, cost, ordered, timer, budget, result)
        arms, dense_seconds = self._arms(subject, result["finalists"], timer)
        subject.loop.close()
        del subject
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.verified is not None:
            result["verified"] = verify(self.verified, self.store, arms, self._share(arms), dense_seconds, self.folder)
        self._conclude(result)

    def _note(self, said: str) -> None:
        self.notes.append(self.job.said(said))

    def _unreached(self, result: dict[str, Any], best: Sequence[Mapping[str, Any]]) -> NoReturn:
        """Refuse a goal that no plan reaches; the message names the best plan there is."""
        goal, misfit = self.options.goal, result["cost"]["error"] > FAR_OFF
        self._refuse(result, text.unreached(goal, best, fastest=goal.speedup is not None, misfit=misfit))

    def _refuse(self, result: dict[str, Any], reason: str) -> NoReturn:
        """Write the report without routes, and raise the reason.

        Routes, result and report always answer the same goal, so the routes of an earlier one are removed; asked for
        again, it is answered from what was measured.
        """
        path = self.folder / CONFIG_FILE
        if path.exists():
            path.unlink()
            reason += f" {path}, the answer to an earlier goal, is removed: ask for that goal again to have it back."
        self._write(result | {"notes": [self.job.said(reason), *self.notes]})
        raise ConfigError(reason)

    def _opening(self, subject: Subject) -> str:
        """The first lines printed: the subject, the rules, and a note about the device."""
        lines = [f"measuring {subject.summary()}", "rules: " + "; ".join(subject.rules.sentences())]
        return "\n".join([*lines, *self.notes])

    def _ratios(self, subject: Subject) -> tuple[float, ...]:
        asked, ceiling = self.options.ratios, subject.rules.ceiling
        ratios = subject.rules.ratios(asked)
        if not ratios:
            raise ConfigError(
                f"--ratios has none of at most {ceiling:g}, the highest that the rules allow here: add a lower one."
            )
        if set(asked) != set(RATIOS) and len(ratios) < len(set(asked)):
            left = ", ".join(f"{ratio:g}" for ratio in asked if ratio not in ratios)
            self._note(f"--ratios {left} left out: the rules allow at most {ceiling:g} here.")
        return ratios

    def _cost(self, subject: Subject, ratios: Sequence[float], timer: Timer, budget: Budget) -> Cost:
        tokens = subject.tokens(measure_kept(subject, self.store, ratios))
        plans = subject.probes(ratios)
        print(
            text.timing(len(plans), [tokens.kept(ratio) for ratio in ratios_of(plans)], tokens.count, subject.compiles)
        )
        seconds = measure_seconds(subject, self.store, plans, timer, budget)
        if len(seconds) < len(plans):
            raise ConfigError(
                f"--budget-minutes {self.options.budget_minutes:g} ended after {len(seconds)} of {len(plans)} plans "
                "were timed: what was measured is kept, give the same command again to go on."
            )
        cost = fit(seconds, subject.stacks, tokens)
        self.timed = {
            key_of(routes): {
                "predicted": cost.seconds(routes),
                "seconds": took,
                "rounds": self.store.get("seconds", key_of(routes)),
            }
            for routes, took in seconds.items()
        }
        if cost.error > FAR_OFF:
            self._note(text.MISFIT.format(error=cost.error))
            print(self.notes[-1])  # printed now: the summary's notes are missing if no plan reaches the goal
        return cost

    def _losses(self, subject: Subject, ratios: Sequence[float], cost: Cost, budget: Budget) -> dict[str, Any]:
        windows = subject.rules.windows(self.options.edges)
        plans = [one_window(ratio, start, end) for start, end in windows for ratio in ratios]
        plans = [routes for routes in plans if not subject.rules.broken(routes)]
        starts = subject.opened.start is not None
        if starts:
            self._note(text.FRESH.format(steps=self.options.start_steps))
            self.store.since_start(self.options.start_steps)
        losses = self._measured(subject, plans, cost, budget, "sensitivity")
        if not losses:
            start = self._start_seconds(cost) / 60
            first = f" A dense start of {self.options.start_steps} steps takes {start:.1f} of them first." * starts
            raise ConfigError(
                f"--budget-minutes {self.options.budget_minutes:g} ended before a window was measured: what was "
                f"measured is kept, give the same command again to go on.{first}"
            )
        if len(losses) < len(plans):
            self._note(
                f"the budget ended after {len(losses)} of {len(plans)} windows; the same command measures the others."
            )
        advice = text.STARTED if starts else text.TRAINED
        check_gaps(losses, advice)
        if (below := sum(gap(some) < 0 for some in losses.values())) > 0:
            self._note(text.BELOW.format(below=below, every=len(losses), advice=advice))
        return losses

    def _start_seconds(self, cost: Cost) -> float:
        return self.options.start_steps * cost.seconds(())

    def _measured(
        self, subject: Subject, plans: Sequence[Routes], cost: Cost, budget: Budget, what: str
    ) -> dict[str, Any]:
        """The losses of some plans; an untrained model first gets its dense start, if the budget has time for it."""
        due = any(self.store.get("losses", key_of(routes)) is None for routes in plans)
        if due and subject.opened.start is not None and not subject.started:
            if self._start_seconds(cost) >= budget.left:
                return stored_losses(self.store, plans)
            subject.start(self.options.start_steps, lambda steps: tqdm(steps, desc="dense start", unit="step"))
        return measure_losses(subject, self.store, plans, budget, what)

    def _search(self, subject: Subject, cost: Cost, losses: Mapping[str, Any]) -> list[Plan]:
        windows = []
        for key, pairs in losses.items():
            (route,) = routes_of(key)
            # a negative gap is noise, since dropping tokens cannot help an unadapted model; noise must not add up
            window = Window(route=route, saving=cost.saving(route), gap=max(0.0, gap(pairs)))
            if window.saving > 0:
                windows.append(window)
        rules = subject.rules
        plans = front(windows, depth=rules.depth, longest=rules.longest, most=self.options.windows)
        return [plan for plan in plans if plan.routes]

    def _result(self, subject: Subject, cost: Cost, losses: Mapping[str, Any], plans: Sequence[Plan]) -> dict[str, Any]:
        return {
            "goal": str(self.options.goal),
            "summary": subject.summary(),
            "dense_seconds": cost.seconds(()),
            "cost": cost.to_config(),
            "timed": self.timed,
            "measured": len(losses),
            "windows": sorted(losses),
            "levels": len(LEVELS),
            "rules": subject.rules.to_config() | {"depth": subject.rules.depth},
            "front": [predicted(plan, cost) for plan in plans],
            "finalists": [],
            "verified": {},
        }

    def _finalists(
        self,
        subject: Subject,
        cost: Cost,
        plans: Sequence[Plan],
        timer: Timer,
        budget: Budget,
        result: dict[str, Any],
    ) -> list[dict[str, Any]]:
        goal = self.options.goal
        best, measured = find_finalists(
            plans,
            goal,
            cost,
            losses_of=lambda some: self._measured(subject, some, cost, budget, "finalists"),
            pairs_of=lambda some: measure_pairs(subject, self.store, some, timer, budget),
        )
        if not best:
            nearest = max(
                measured, key=lambda row: -measured_gap(row) if goal.speedup is None else measured_speedup(row)
            )
            self._unreached(result, [{**nearest, "speedup": measured_speedup(nearest), "gap": measured_gap(nearest)}])
        slow = [row for row in measured if goal.speedup is not None and measured_speedup(row) < goal.speedup]
        if slow:
            plans_left = "; ".join(f"{text.named(row['plan'])} ({measured_speedup(row):.2f})" for row in slow)
            self._note(text.SLOW.format(speedup=goal.speedup, plans=plans_left))
        return best

    def _arms(self, subject: Subject, finalists: Sequence[dict[str, Any]], timer: Timer) -> tuple[list[Arm], float]:
        """The verifying runs, if any, and the seconds of a dense step; those that are new are timed by this process."""
        if self.verified is None:
            return [], 0.0
        arms = [Arm(routes=(), tread_config=None, speedup=1.0)]
        names = [row["plan"] for row in finalists]
        new = unplanned(self.store, [DENSE, *names], self._share([DENSE, *names]))
        every = [routes_of(name) for name in names if name in new]
        pairs = measure_pairs(subject, self.store, every, timer, Budget(float("inf")), afresh=True)
        for row in finalists:
            if row["plan"] in pairs:
                time_beside_dense(row, pairs[row["plan"]])
            arms.append(
                Arm(
                    routes=routes_of(row["plan"]),
                    tread_config=self._tread_config(row["plan"]),
                    speedup=measured_speedup(row),
                )
            )
        times = [pair["dense"] for some in pairs.values() for pair in some]
        return arms, statistics.median(times) if times else 0.0

    def _share(self, arms: Sequence[object]) -> float:
        """Seconds of each verifying run."""
        assert self.options.verify_minutes is not None
        return 60 * self.options.verify_minutes / len(arms)

    def _tread_config(self, name: str) -> dict[str, Any]:
        return {**self.job.routing, "routes": [route.to_config() for route in routes_of(name)]}

    def _conclude(self, result: dict[str, Any]) -> None:
        names = [one["plan"] for one in result["finalists"]]
        took = [one["seconds"] for one in result["verified"].values() if one["seconds"] is not None]
        if took:
            self._note(text.VERIFIED)
        if took and max(took) > (1 + FAR_OFF) * min(took):
            self._note(text.UNEQUAL.format(least=min(took), most=max(took)))
        left = standing(names, result["verified"])
        for one in result["finalists"]:
            one["rejected"] = one["plan"] not in left
        self._note(text.GAP)
        if any(" " in one["plan"] for one in result["front"]):
            self._note(text.SUMMED)
        if not left:
            self._refuse(
                result,
                "every finalist fell apart in its verifying run, so no routes are proposed: train dense, or ask for "
                f"less. All figures are in {self.folder / FILE}.",
            )
        chosen = next(one for one in result["finalists"] if one["plan"] == left[0])
        timed, speedup = chosen["timed_speedup"], chosen["speedup"]
        if timed is not None and abs(timed / speedup - 1) > FAR_OFF:
            self._note(text.UNLIKE.format(timed=timed, speedup=speedup))
        schedule = self.job.schedule(self._tread_config(chosen["plan"]), 1)
        if schedule is not None and (share := schedule.cooldown_fraction):
            whole = 1 / ((1 - share) / measured_speedup(chosen) + share)
            self._note(
                f"the schedule runs the last {share:.0%} of the steps dense: a whole run is {whole:.2f} times as fast."
            )
        result |= {"chosen": chosen["plan"], "tread_config": self._tread_config(chosen["plan"])}
        path = self.folder / CONFIG_FILE
        write_text(path, json.dumps({"tread_config": result["tread_config"]}, indent=1) + "\n")
        result["command"] = self.job.command(self.options.config, self.options.settings, path)
        self._write(result | {"notes": self.notes})
        print(text.summary(result | {"notes": self.notes}))
        print(f"\nroutes: {path}\ntrain with: {result['command']}")

    def _write(self, result: Mapping[str, Any]) -> None:
        self.store.conclude(result)
        print(f"report: {write_page(self.folder, self.store.facts)}")
