"""The page in a browser and as text: what is drawn, what it survives, what it never does."""

from __future__ import annotations

import html.parser
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from synthetic import facts, make_run, metrics, write_lines

from surefoot.config import RunError
from surefoot.report.page import write_report

FIGURES = (
    "bits_per_byte",
    "loss",
    "gradient_norm",
    "learning_rate",
    "update_ratio",
    "tokens_per_second",
    "mfu",
    "waiting",
    "memory_bytes",
)
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def data_of(page: Path) -> dict[str, Any]:
    """The data embedded in a page, read as strict JSON."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    text = page.read_text(encoding="utf-8").split('<script type="application/json" id="data">', 1)[1]
    value: dict[str, Any] = json.loads(text.split("</script>", 1)[0], parse_constant=refuse)
    return value


def without_scripts(page: Path) -> str:
    """The page's markup without the content of its scripts and styles."""
    return re.sub(r"(<(script|style)[^>]*>).*?</\2>", r"\1</\2>", page.read_text(encoding="utf-8"), flags=re.DOTALL)


class Tags(html.parser.HTMLParser):
    """All tags and the attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.mark.browser
def test_every_trace_of_one_run_is_drawn(tmp_path: Path, browse: Any) -> None:
    page = write_report([make_run(tmp_path / "quickstart")], tmp_path / "report.html")
    visit = browse(page)
    assert visit.console == []
    assert visit.root("error") is None
    assert visit.root("drawn") == str(len(FIGURES))
    figures = {figure["name"]: figure["traces"] for figure in data_of(page)["figures"]}
    assert tuple(figures) == FIGURES
    # raw + mean + held out; raw + mean + clipped; raw + mean for each of three roles.
    expected = {
        "bits_per_byte": 3,
        "loss": 3,
        "gradient_norm": 3,
        "update_ratio": 6,
        "learning_rate": 1,
        "memory_bytes": 1,
    }
    for name, traces in figures.items():
        assert len(visit.drawn(name)) == len(traces) == expected.get(name, 2)
        assert all(re.search(r'class="(js-line|point)"[^>]*\sd="M', drawn) for drawn in visit.drawn(name)), name
    # Ten held-out evaluations, ten marks.
    marked = [trace for trace in visit.drawn("bits_per_byte") if 'class="point"' in trace]
    assert [trace.count('class="point"') for trace in marked] == [10]


@pytest.mark.browser
def test_several_runs_and_the_address(tmp_path: Path, browse: Any) -> None:
    runs = [
        make_run(tmp_path / name, num_steps=steps, seed=steps) for name, steps in (("a", 110), ("b", 150), ("c", 200))
    ]
    page = write_report(runs, tmp_path / "report.html")
    visit = browse(page, "#x=flops&logx=1&hide=1&log=loss")
    assert visit.console == []
    assert len(visit.drawn("bits_per_byte")) == 2 * 3
    assert visit.plot("loss", "x") == "flops"
    assert visit.plot("loss", "xtype") == "log"
    assert (visit.plot("loss", "ytype"), visit.plot("gradient_norm", "ytype")) == ("log", "linear")
    assert float(visit.plot("loss", "end")) == pytest.approx(200 * 2048 * 3.9e7, rel=1e-5)


@pytest.mark.browser
def test_switches_work_by_hand(tmp_path: Path, browse: Any) -> None:
    runs = [make_run(tmp_path / name, num_steps=110, seed=seed) for seed, name in enumerate(("a", "b"))]
    page = write_report(runs, tmp_path / "report.html")
    # The page's own policy would refuse the test's script.
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    actions = """
      const pause = () => new Promise((resolve) => setTimeout(resolve, 400));
      (async () => {
        await pause();
        document.querySelector("[name=x][value=tokens]").click(); await pause();
        document.querySelector("[name=run][value='0']").click(); await pause();
        document.getElementById("log-loss").click(); await pause();
        await Plotly.relayout("plot-loss", { "xaxis.range[0]": 1000, "xaxis.range[1]": 90000 }); await pause();
        document.documentElement.dataset.hash = location.hash;
        document.documentElement.dataset.range = document.getElementById("plot-mfu").layout.xaxis.range.join();
      })();
    """
    page.write_text(text.replace("</body>", f"<script>{actions}</script></body>"), encoding="utf-8")
    visit = browse(page)
    assert visit.console == []
    assert visit.plot("mfu", "x") == "tokens"
    assert float(visit.plot("mfu", "end")) == 110 * 2048
    assert len(visit.drawn("mfu")) == 2
    assert visit.plot("loss", "ytype") == "log"
    assert visit.root("range") == "1000,90000"
    assert dict(pair.split("=") for pair in visit.root("hash")[1:].split("&amp;")).keys() == {"x", "log", "hide"}


@pytest.mark.browser
def test_hostile_text_stays_text(tmp_path: Path, browse: Any) -> None:
    run = make_run(tmp_path / '<img src=x onerror="document.title=1">%{y}')
    planted = [{"prompt": HOSTILE, "text": "</pre></script>" + HOSTILE + "\x00\x1b\ud800\u202e"}]
    (run / "samples" / "step-00000999.json").write_text(json.dumps(planted), encoding="utf-8")
    known = facts(10) | {HOSTILE: {HOSTILE: [HOSTILE, {HOSTILE: None}]}, "device": {"name": HOSTILE}}
    (run / "facts.json").write_text(json.dumps(known), encoding="utf-8")
    (run / "run.json").write_text(json.dumps({HOSTILE: HOSTILE}), encoding="utf-8")
    lines = metrics(50, learning_rate=0.01)
    for line in lines:
        line["update_ratio"] = {"</script>" + HOSTILE: 0.001}
    write_lines(run / "metrics.jsonl", lines)
    other = make_run(tmp_path / "other", num_steps=50)
    page = write_report([run, other], tmp_path / "report.html")
    tags = Tags(without_scripts(page)).tags
    assert [tag for tag, _ in tags].count("script") == 3
    assert "img" not in [tag for tag, _ in tags]
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]
    visit = browse(page)
    assert visit.console == []  # a script or an image that got through would at least break the policy here
    assert "<title>2 runs · surefoot</title>" in visit.dom
    assert visit.root("drawn") == str(len(FIGURES))
    assert "␀␛" in visit.dom


@pytest.mark.browser
def test_gaps_and_a_run_in_progress(tmp_path: Path, browse: Any) -> None:
    run = tmp_path / "unfinished"
    run.mkdir()
    lines = metrics(60, learning_rate=0.01)
    for line in lines[20:25]:
        line["bits_per_byte"] = None
    lines[30]["loss"] = math.nan
    lines[31]["loss"] = math.inf
    lines[32]["loss"] = 10**400
    for line in lines:
        del line["mfu"]
    write_lines(run / "metrics.jsonl", lines)
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 61, "loss": 2.')
    (run / "run.json").write_text(json.dumps({"train": {"num_steps": 400}}), encoding="utf-8")
    page = write_report([run], tmp_path / "report.html")
    figures = {figure["name"]: figure["traces"] for figure in data_of(page)["figures"]}
    assert figures["bits_per_byte"][0]["y"][20:25] == [None] * 5
    assert [index for index, value in enumerate(figures["loss"][0]["y"]) if value is None] == [30, 31, 32]
    assert "mfu" not in figures
    assert "step 60 of 400: still going, or stopped" in without_scripts(page)
    visit = browse(page)
    assert visit.console == []
    # The pen is lifted at the gap: a second move in the line's path.
    paths = re.findall(r'class="js-line"[^>]*\sd="([^"]*)"', visit.drawn("bits_per_byte")[0])
    assert sum(path.count("M") for path in paths) == 2


def test_nothing_recorded_yet(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    page = write_report([tmp_path], tmp_path / "report.html")
    text = page.read_text(encoding="utf-8")
    assert "No step has been recorded yet." in text
    assert "<script" not in text


def test_damaged_files_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=20)
    (run / "facts.json").write_text('{"device"', encoding="utf-8")
    (run / "run.json").write_text("[" * 100_000, encoding="utf-8")
    text = without_scripts(write_report([run], tmp_path / "report.html"))
    assert "facts.json could not be read" in text
    assert "run.json could not be read" in text


def test_one_file_that_fetches_nothing(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run", num_steps=40)], tmp_path / "report.html")
    text = page.read_text(encoding="utf-8")
    assert text.count("* plotly.js v") == 1
    tags = Tags(without_scripts(page)).tags
    assert not [attributes for _, attributes in tags if "src" in attributes]
    assert [attributes["href"] for _, attributes in tags if "href" in attributes] == ["data:,"]
    policy = next(
        attributes["content"] for _, attributes in tags if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


def test_readable_without_eyes(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, num_steps=40, seed=seed) for seed, name in enumerate(("a", "b"))]
    tags = Tags(without_scripts(write_report(runs, tmp_path / "report.html"))).tags
    charts = [attributes for _, attributes in tags if attributes.get("role") == "img"]
    assert len(charts) == len(FIGURES)
    assert all("at step 40" in (chart["aria-label"] or "") for chart in charts)
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in tags if tag == "th")
    levels = [int(tag[1]) for tag, _ in tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_settings_that_differ(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run-{rate}", num_steps=40, learning_rate=rate) for rate in (0.01, 0.02)]
    text = without_scripts(write_report(runs, tmp_path / "report.html"))
    table = text.split("<h2>Settings that differ</h2>", 1)[1].split("</table>", 1)[0]
    rows = re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td>', table)
    assert rows == [("name", "run-0.01", "run-0.02"), ("optim.lr", "0.01", "0.02")]


def test_one_value_of_another_type_differs(tmp_path: Path) -> None:
    runs = []
    for name, value in (("a", 1), ("b", True)):
        runs.append(make_run(tmp_path / name, num_steps=20))
        (runs[-1] / "run.json").write_text(json.dumps({"x": value, "same": 1}), encoding="utf-8")
    text = without_scripts(write_report(runs, tmp_path / "report.html"))
    table = text.split("<h2>Settings that differ</h2>", 1)[1].split("</table>", 1)[0]
    assert re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td>', table) == [("x", "1", "yes")]


def test_the_newest_sample_comes_first_and_the_first_is_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=40)
    for step in range(100, 400):
        (run / "samples" / f"step-{step:08d}.json").write_text('[{"prompt": "a", "text": "b"}]', encoding="utf-8")
    text = without_scripts(write_report([run], tmp_path / "report.html"))
    steps = [int(step) for step in re.findall(r"<summary>Step (\d+)</summary>", text)]
    assert len(steps) == 40
    assert steps == sorted(steps, reverse=True)
    assert (steps[0], steps[-1]) == (399, 10)


def test_writing_fails_in_one_line_and_keeps_the_old_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=20)
    with pytest.raises(RunError, match=r"^[^\n]*is not a run folder[^\n]*$"):
        write_report([tmp_path / "absent"], tmp_path / "report.html")
    with pytest.raises(RunError, match=r"^[^\n]*cannot be written[^\n]*$"):
        write_report([run], tmp_path / "absent" / "report.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError, match="cannot be written"):
        write_report([run], tmp_path / "folder")
    with pytest.raises(RunError, match="at least one"):
        write_report([], tmp_path / "report.html")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "run"]
    page = write_report([run], tmp_path / "report.html")
    before = page.read_bytes()
    with pytest.raises(RunError):
        write_report([run, tmp_path], page)
    assert page.read_bytes() == before
    assert write_report([run], page).read_bytes() == before
