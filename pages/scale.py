"""The plans and tables of docs/scale.md: what `tread plan MODEL --gpus N` says now."""

import shlex
import warnings
from contextlib import redirect_stdout
from io import StringIO

from pages.tables import markdown_table, with_tables
from tread.cli import main
from tread.errors import RiskWarning
from tread.report.planning.cluster import make_cluster, steps
from tread.report.planning.links import ASSUMED
from tread.report.planning.models import find_model
from tread.report.planning.settings import make_run
from tread.routing.plan import RoutePlan

PLANS = {
    "ImageNet at 512 pixels, DiT-XL/2, 8 GPUs": "plan dit/XL/2 --resolution 512 --batch 32 --gpus 8",
    "The same on 64 GPUs": "plan dit/XL/2 --resolution 512 --batch 16 --gpus 64",
    "All weights of FLUX.1, 8 GPUs": "plan flux --full --checkpointing --gpus 8 --parallel fsdp",
    "All weights of Wan 2.1 14B, 81 frames, 64 GPUs": "plan wan --full --checkpointing --gpus 64 --parallel hsdp",
}
"""Worked plans by their titles."""


def plans() -> str:
    """Each plan: its command, and the part of its output about several GPUs."""
    parts = []
    for title, command in PLANS.items():
        said = StringIO()
        with redirect_stdout(said), warnings.catch_warnings():
            warnings.simplefilter("ignore", RiskWarning)
            main(shlex.split(command))
        parts.append(
            f"### {title}\n\n```\n$ tread {command}\n...\n{said.getvalue().strip().split(chr(10) * 2)[-1]}\n```"
        )
    return "\n\n".join(parts)


def tokens() -> str:
    """How a step of DiT-XL/2 grows with the size of its images."""
    model = find_model("dit/XL/2")
    plan = RoutePlan.from_config({"preset": "paper"}).resolve(model.depth)
    rows = []
    for pixels in (256, 512, 1024, 2048):
        run = make_run(model, resolution=str(pixels), batch=1)
        both = steps(model, run, plan, make_cluster(1), ASSUMED)
        work = [1e3 * step.compute for step in both]
        kept = [step.memory["activations"] / 2**20 for step in both]
        figures = (f"{work[0]:.1f}", f"{work[1]:.1f}", f"{work[0] / work[1]:.2f}", f"{kept[0]:,.0f}", f"{kept[1]:,.0f}")
        rows.append((str(pixels), f"{(pixels // 16) ** 2:,}", *figures))
    head = ("pixels", "tokens", "ms, dense", "ms, routed", "gain", "MiB kept, dense", "MiB kept, routed")
    return markdown_table(head, rows)


def gpus() -> str:
    """How a step of all of FLUX's weights changes with the number of GPUs and the way they share it."""
    model = find_model("flux")
    run = make_run(model, way="full", checkpointing="full")
    plan = RoutePlan.from_config({"preset": "paper"}).resolve(model.depth)
    rows = []
    for count, parallel in (
        (1, "ddp"), (8, "ddp"), (8, "fsdp"), (16, "fsdp"), (64, "fsdp"), (64, "hsdp"), (256, "hsdp")
    ):  # fmt: skip
        step = steps(model, run, plan, make_cluster(count, parallel=parallel), ASSUMED)[1]
        times = (f"{1e3 * step.collectives:,.0f}", f"{1e3 * step.exposed:,.1f}", f"{1e3 * step.seconds:,.0f}")
        rows.append((str(count), parallel, f"{step.gib:.1f}", *times, f"{count / step.seconds:.1f}"))
    head = ("GPUs", "parallel", "GiB on each", "ms of collectives", "not hidden", "ms of a step", "images/s")
    return markdown_table(head, rows)


def updated(page: str) -> str:
    """The page with its plans and tables as they are now."""
    return with_tables(page, {"plans": plans(), "tokens": tokens(), "gpus": gpus()})
