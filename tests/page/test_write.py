"""`tread report` from the command line: what it reads, writes, leaves out and refuses; the report at a run's end."""

import json
import re
import shutil
import signal
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.page.conftest import DRAWN, write_run
from tests.tiny.runs import go_on, train
from tests.training.test_loop import before_step, interruptible
from tread.cli import main
from tread.errors import Stopped
from tread.page import write
from tread.page.read import read_run
from tread.page.write import FILE
from tread.training.record import read_record

__all__ = ["interruptible"]
pytestmark = pytest.mark.filterwarnings("ignore")
Capture = pytest.CaptureFixture[str]
REPORT = {"features": "inception", "samples": 10, "reference": 20, "metrics": {"FID": 12.5, "recall": 0.5}, "notes": []}


def report(*arguments: object) -> str:
    """The page that a call wrote, which is the last thing in its folder."""
    main(["report", *map(str, arguments), "--out", "page.html"])
    return Path("page.html").read_text(encoding="utf-8")


def refused(capsys: Capture, *arguments: object) -> str:
    """The sentence that a call is refused with."""
    with pytest.raises(SystemExit) as end:
        main(["report", *map(str, arguments)])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("tread report: ")
    assert said.count("\n") == 1
    assert len(said) < 520
    return said.removeprefix("tread report: ").strip()


def test_one_run_is_written_into_its_folder(routed: Path, capsys: Capture) -> None:
    (routed / FILE).unlink()
    main(["report", str(routed)])
    assert capsys.readouterr().out == f"{routed / FILE}\n"
    page = (routed / FILE).read_text(encoding="utf-8")
    sections = ["Overview", "Loss", "Pictures over time", "Speed and memory", "Tokens kept", "Optimisation", "Settings"]
    for title in [*sections, "Commands and versions"]:
        assert f"<h2>{title}</h2>" in page
    assert page.count('class="frame" data-step=') == 4 + 2 * 8  # grids at 4, 8, 12 and 16; masks of two routes
    assert "16 of 16" in page
    assert f"tread report {routed}" in page


def test_several_runs_side_by_side(runs: Path) -> None:
    page = report(runs / "routed", runs / "dense")
    assert "<h1>2 pretraining runs</h1>" in page
    assert "<td>tread</td><td><mark>dit</mark></td>" in page
    assert "model.<wbr/>tread_<wbr/>config.<wbr/>routes.<wbr/>0.<wbr/>selection_<wbr/>ratio" in page  # on a phone
    shared = page.partition("that all runs share")[2]
    assert "train.<wbr/>batch_<wbr/>size" in shared
    assert "output_dir" not in page.partition("<h2>Settings</h2>")[2].partition("<h2>")[0]


def test_two_runs_of_one_name_have_names_of_their_own(runs: Path, routed: Path, tmp_path: Path) -> None:
    other = shutil.copytree(routed, tmp_path / "other" / "routed")
    page = report(runs / "routed", other)
    assert f"{runs.name}/routed (1)" in page
    assert "other/routed (2)" in page


def test_one_run_given_twice_is_refused(runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two curves, one over the other, would look like one run that is missing."""
    monkeypatch.chdir(runs)
    with pytest.raises(SystemExit):
        main(["report", "routed", "dense", str(runs / "routed")])
    assert f"'routed' and '{runs}/routed' are one run: name it once." in capsys.readouterr().err
    assert not (runs / "report.html").exists()


def test_a_page_holds_all_it_needs(runs: Path) -> None:
    page = report(runs / "routed", runs / "dense")
    assert "$" not in page.partition("<script>\n")[0]  # every place of the template is filled
    for outside in ("http:", "https:", "url(", "@import", "<link", 'src="/', 'src=".'):
        assert outside not in page.replace("http://www.w3.org/2000/svg", "")


EVIL = "<!--<script></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Elements(HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def check_markup(page: str, *, blocks: int) -> None:
    """The page's own script and so many blocks of numbers, no picture and no handler of an event."""
    found = Elements(page).found
    assert [given.get("type") for tag, given in found if tag == "script"] == ["application/json"] * blocks + [None]
    assert not [tag for tag, _ in found if tag == "img"]
    assert not [name for _, given in found for name in given if name.startswith("on")]
    held = re.findall(r'<script type="application/json">(.*?)</script>', page)
    assert len(held) == blocks
    assert not [block for block in held if "<" in block], "`<!--<script>` in a script would swallow the page"


def test_nothing_from_a_file_becomes_markup(tmp_path: Path) -> None:
    """Names of runs, metrics, settings and prompts, notes, summaries, commands, versions."""
    lines = [{"step": 1, "loss": 1.0, EVIL: 2.0}, {"step": 2, "loss": 0.5, EVIL: 1.0}]
    folder = write_run(
        tmp_path / EVIL.replace("/", "-"), lines, facts={"tread_config": {EVIL: 1}}, **{EVIL: {EVIL: EVIL}}
    )
    record = {
        "summary": EVIL,
        "facts": {},
        "starts": [{"time": EVIL, "command": EVIL, "device": EVIL, "versions": {EVIL: EVIL}}],
    }
    (folder / "run.json").write_text(json.dumps(record))
    page = report(folder, write_run(tmp_path / "other", lines))
    check_markup(page, blocks=2)  # the loss, and the metric of that name
    assert "&lt;script&gt;alert(1)" in page
    Path("e.json").write_text(json.dumps(REPORT | {"metrics": {EVIL: 1.0}, "features": EVIL, "notes": [EVIL]}))
    check_markup(report("e.json"), blocks=0)


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 1.0}]
    page = report(write_run(tmp_path / "run", lines, data={"hub_token": "hunter2", "name": "digits"}))
    assert "hunter2" not in page
    assert "********" in page


def test_the_overview_of_a_long_run(tmp_path: Path) -> None:
    """Its lowest validation loss if that was not the last, the mean of its last steps, and hours."""
    lines = [{"step": step, "loss": float(step)} for step in range(1, 41)]
    lines += [{"step": 20, "val_loss": 0.25}, {"step": 40, "val_loss": 0.5}, {"step": 40, "images_per_second": 0.1}]
    page = report(write_run(tmp_path / "run", lines))
    assert "0.5000; lowest 0.2500 at step 20" in page
    assert "38.5000, mean of the last 4 steps" in page
    assert "1 h 6 min" in page
    assert "GiB" not in page, "the memory was not logged"


def test_damaged_lines_are_left_out_with_a_note(routed: Path) -> None:
    whole = report(routed)
    assert "cannot be read" not in whole
    with (routed / "metrics.jsonl").open("a") as file:
        file.write('not json\n{"step": "three"}\n{"step": 17, "loss": "high", "grad_norm": 1e999}\n{"step": 18, "lo')
    page = report(routed)
    assert "3 lines of metrics.jsonl cannot be read, and are left out." in page
    assert "17 of 16" in page  # the line is whole; its values are not numbers


def test_a_run_without_a_record_is_shown_by_its_checkpoint(routed: Path) -> None:
    (routed / "run.json").unlink()
    page = report(routed)
    assert "no record of its starts" in page
    assert "route 1: layers 1 to 2, 50% dropped" in page
    shutil.rmtree(routed / "checkpoints")
    assert "The run did not record its routes." in report(routed)


def test_pictures_that_cannot_be_opened_are_left_out(routed: Path) -> None:
    (routed / "samples" / "step-00000004.png").write_bytes(b"no picture")
    with Image.open(routed / "samples" / "step-00000016.png") as image:
        image.load()
    whole = (routed / "samples" / "step-00000016.png").read_bytes()
    (routed / "samples" / "step-00000016.png").write_bytes(whole[: len(whole) // 2])
    assert report(routed).count('class="frame" data-step=') == 2 + 2 * 8


def test_of_many_large_pictures_some_are_shown_scaled(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [{"step": step, "loss": 1.0} for step in range(1, 101)])
    (folder / "samples").mkdir()
    for step in range(1, 101):
        Image.effect_noise((900, 600) if step == 1 else (8, 8), 90).save(folder / "samples" / f"step-{step:08d}.png")
    page = report(folder)
    assert "48 of 100 steps are shown." in page
    assert 'width="768" height="512"' in page
    assert page.count("data:image/webp") == 1


def test_evaluations_side_by_side(tmp_path: Path) -> None:
    Path("one.json").write_text(json.dumps(REPORT))
    work = tmp_path / "work"
    work.mkdir()
    start = {"command": "tread eval samples --ref data --work work", "time": "now", "device": "cpu"}
    other = REPORT | {"metrics": {"FID": 10.0}, "paths": {"samples": "s"}, "start": start, "notes": ["few images"]}
    (work / "evaluation.json").write_text(json.dumps(other))
    page = report("one.json", "work")
    assert "<h1>2 evaluations</h1>" in page
    assert '<th scope="row">FID</th><td>12.5</td><td>10</td>' in page
    assert "work: few images" in page
    assert start["command"] in page
    assert "<h2>Loss</h2>" not in page


def test_a_fine_tune_with_previews(tmp_path: Path, tune_config: dict[str, Any]) -> None:
    (tmp_path / "c.json").write_text(json.dumps(tune_config))
    main(["finetune", "c.json"])
    page = (tmp_path / "tuned" / FILE).read_text(encoding="utf-8")
    assert page.count("<figcaption>a red circle</figcaption>") == 2
    assert page.count("<figcaption>&lt;b&gt;bold&lt;/b&gt;</figcaption>") == 2
    assert "by FLOPs" in page
    facts = read_record(tmp_path / "tuned")["facts"]
    assert facts["speedup"] > 1
    assert f"{facts['speedup']:.2f} x" in page


def test_figures_as_png(runs: Path, capsys: Capture) -> None:
    main(["report", str(runs / "routed"), str(runs / "dense"), "--png", "pictures"])
    _, *names = capsys.readouterr().out.splitlines()
    assert {Path(name).name for name in names} >= {"loss.png", "val-loss.png", "speed-up.png", "memory.png"}
    for name in names:
        with Image.open(name) as image:
            assert image.size == (960, 570)
            assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 20  # something is drawn


def test_without_matplotlib_the_extra_is_named(runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = refused(capsys, runs / "dense", "--out", "x.html", "--png", "pictures")
    assert said == "figures as PNG need matplotlib: pip install 'tread-diffusion[demo]'"


def test_what_is_no_run_is_refused(capsys: Capture, tmp_path: Path, runs: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refused(capsys, "nowhere") == "there is no 'nowhere'; name the folder of a run."
    assert refused(capsys, "empty").startswith("'empty' is not the folder of a run: it has no config.yaml, and no ")
    Path("empty/measurements.json").write_text("{}")
    assert refused(capsys, "empty").startswith("'empty' is the folder of a tuning, whose report `tread autotune` has ")
    Path("x.json").write_text("{}")
    assert refused(capsys, "x.json").startswith("'x.json' has no figures of an evaluation: give what `tread eval ")
    Path("empty/config.yaml").write_text("[1, 2]")
    assert refused(capsys, "empty") == "empty/config.yaml is not the config of a run; restore it."
    Path("empty/config.yaml").write_text("model: {name: dit}\n")
    for lines in (None, "", '{"step": 1, "lo'):
        if lines is not None:
            Path("empty/metrics.jsonl").write_text(lines)
        assert refused(capsys, "empty") == (
            "empty has no metrics yet: a run writes the first lines of metrics.jsonl after log.every steps."
        )
    Path("e.json").write_text(json.dumps(REPORT))
    assert refused(capsys, runs / "dense", "e.json") == (
        f"{runs / 'dense'} is a pretraining run and e.json an evaluation: their figures mean different things, so one "
        "report has runs of one kind. Write a report of each."
    )


def test_what_cannot_be_written_is_refused(capsys: Capture, runs: Path, tmp_path: Path) -> None:
    said = refused(capsys, runs / "dense", "--out", tmp_path)
    assert said == f"--out is '{tmp_path}', which is a folder; name a file, such as {tmp_path / FILE}."
    assert refused(capsys, runs / "dense", "--out", "no/such/page.html").startswith("cannot write no/such/page.html (")
    Path("file").touch()
    assert refused(capsys, runs / "dense", "--out", "x.html", "--png", "file").startswith("cannot write file (")


def test_a_run_writes_its_report_when_it_goes_on_too(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", "train.steps=2", *DRAWN)
    assert "2 of 2" in (folder / FILE).read_text()
    go_on(folder, "train.steps=4")
    page = (folder / FILE).read_text()
    assert "4 of 4" in page
    assert [start["step"] for start in read_record(folder)["starts"]] == [0, 2]
    assert ", from step 2" in page
    before = (folder / FILE).stat().st_mtime_ns
    go_on(folder)
    assert (folder / FILE).stat().st_mtime_ns == before, "nothing was trained"


@pytest.mark.usefixtures("interruptible")
def test_a_run_that_a_signal_stopped_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        before_step(patch, 3, lambda: signal.raise_signal(signal.SIGTERM))
        train(tmp_path / "run", "train.steps=8")
    assert "4 of 8" in (tmp_path / "run" / FILE).read_text()


def test_a_report_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def broken(*_: object) -> str:
        raise ZeroDivisionError("one\ntwo")

    monkeypatch.setattr(write, "page", broken)
    folder = train(tmp_path / "run", "train.steps=2")
    said = capsys.readouterr().out
    assert said.endswith(f"warning: the run is complete, but its report could not be written: one two\nrun: {folder}\n")
    assert not (folder / FILE).exists()
    assert (folder / "checkpoints" / "step-00000002").is_dir()


def test_speed_lines_tell_the_memory(runs: Path) -> None:
    peaks = [peak for _, peak in read_run(runs / "dense").values("memory_gib")]
    assert len(peaks) == 16 // 2
    assert peaks == sorted(peaks)
    assert 0.05 < peaks[-1] < 100


@pytest.mark.parametrize(("more", "words"), [({}, "1 setting differs."), ({"b": 1}, "2 settings differ.")])
def test_settings_that_differ_are_counted(tmp_path: Path, more: dict[str, int], words: str) -> None:
    lines = [{"step": 1, "loss": 1.0}]
    folders = [
        write_run(tmp_path / "one", lines, data={"a": 1}),
        write_run(tmp_path / "other", lines, data={"a": 2} | more),
    ]
    assert words in write.write_report(folders, tmp_path / "page.html").read_text()
