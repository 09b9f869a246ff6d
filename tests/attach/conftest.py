"""Fixtures, and `--contract-report FILE`: what the contract found, case by case, as a Markdown page."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import tread
from tests.attach.attached import FLUX, ROUTES, Attach, routed
from tests.attach.selected import TOY_CONFIG
from tests.tiny.runs import forget
from tests.tiny.toy import FAMILY, Toy, inputs

FILES = ("contract", "compile", "adapters", "quantized")
PACKAGES = ("torch", "diffusers", "peft", "torchao", "bitsandbytes", "optimum-quanto")


@pytest.fixture
def attach() -> Iterator[Attach]:
    """`tread.attach`, taken back at the end: rotary functions are shared by all models of a process."""
    handles: list[tread.Attachment] = []

    def record(*args: Any, **kwargs: Any) -> tread.Attachment:
        handles.append(tread.attach(*args, **kwargs))
        return handles[-1]

    yield record
    for handle in handles:
        handle.detach()


@pytest.fixture
def accelerates_state() -> Iterator[None]:
    """Accelerate remembers its first use in a process, such as its precision."""
    forget()
    yield
    forget()


@pytest.fixture
def expected() -> torch.Tensor:
    """FLUX routed at step 0."""
    model = FLUX.model()
    with tread.attach(model, ROUTES) as handle:
        return routed(FLUX, model, handle)


@pytest.fixture(name="routed")
def routed_toy() -> torch.Tensor:
    """The toy routed at step 0."""
    model = Toy()
    with tread.attach(model, TOY_CONFIG, family=FAMILY) as handle:
        handle.set_step(0)
        return model(**inputs())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--contract-report", type=Path, help="write the results by case to this file")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        case: Any = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if Path(__file__).parent in item.path.parents and case is not None:  # a hook sees the tests of every folder
            item.user_properties.append(("case", case.name))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("contract_report", default=None)
    if path is None:
        return
    counts: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    remarks: dict[str, set[str]] = defaultdict(set)
    for outcome in ("passed", "failed", "error", "xfailed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            case = dict(report.user_properties).get("case")
            if case is None:
                continue
            counts[case][Path(report.fspath).stem.removeprefix("test_")][outcome] += 1
            if outcome in ("xfailed", "skipped"):
                reason = report.wasxfail if outcome == "xfailed" else report.longrepr[2].removeprefix("Skipped: ")
                remarks[case].add(f"{report.nodeid.partition('::')[2].partition('[')[0]}: {reason}")
    path.write_text(_page(counts, remarks))


def _page(counts: dict[str, dict[str, Counter[str]]], remarks: dict[str, set[str]]) -> str:
    total = Counter[str]()
    for files in counts.values():
        for counter in files.values():
            total += counter
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    said = ", ".join(f"{number} {outcome}" for outcome, number in total.items())
    lines = [
        "# The contract, case by case",
        "",
        f"Written by `make contract` on the CPU: {said}.",
        f"With {versions}.",
        "Passed tests of each file in `tests/attach`; a remark where one was expected to fail or did not apply.",
        "",
        f"| case | {' | '.join(FILES)} | remarks |",
        f"|---|{'---|' * len(FILES)}---|",
    ]
    for case in sorted(counts):
        cells = []
        for name in FILES:
            found = counts[case][name]
            bad = found["failed"] + found["error"]
            cells.append(f"{found['passed']}" + (f", **{bad} failed**" if bad else "") if found else "")
        lines.append(f"| {case} | {' | '.join(cells)} | {'<br>'.join(sorted(remarks[case]))} |")
    return "\n".join(lines) + "\n"
