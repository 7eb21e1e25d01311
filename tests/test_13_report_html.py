"""A report as a page for a browser, as Markdown, and as a comparison of runs."""

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import apsw
import pytest
from conftest import Ended, Project, run_in_two_attempts

import batchrun
from batchrun import Host, Ledger, Sheet, open_ledger

SECTIONS = [
    *("Over time", "Attempts", "Operations", "Rejects", "Releases, last in, first out"),
    *("Recorded cleanups", "Events"),
]
VOID = {"meta", "path"}


class Page(HTMLParser):
    """What a browser would find in a page; fails on a tag that is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []  # tag around it, text
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def within(self, tag: str) -> list[str]:
        return [text for around, text in self.texts if around == tag]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with a finished run of two attempts."""
    project, code = run_in_two_attempts(
        tmp_path_factory.mktemp("report"),
        'ctx.cleanup(remove, name="<i>scratch</i>")',
        reason="<script>alert(1)</script> & | `x` password=hunter2",
        error="<img src=x onerror=alert(1)> https://joe:s3cr3t@example.org",
    )
    assert code == 10
    return project


@pytest.fixture(scope="module")
def text(shop: Project) -> str:
    """Its report as a page."""
    path = shop.folder / "report.html"
    assert shop.run("report", "sync", "--html", "report.html") == Ended(0, f"written: {path}\n", "")
    return path.read_text(encoding="utf-8")


# --- the page of a run ----------------------------------------------------------------------------


def test_a_page_is_whole_and_has_each_section(text: str) -> None:
    page = Page(text)
    assert page.within("h1") == page.within("title")[:1] == ["sync: succeeded"]
    assert page.within("h2")[1:] == SECTIONS
    assert re.fullmatch(r"Run [0-9a-f]{10}", page.within("h2")[0])
    named = dict(zip(page.within("dt"), page.within("dd"), strict=True))
    assert (named["records read"], named["rejected"], named["attempts"]) == ("50 of 50", "1", "2")


def test_a_page_fetches_nothing_and_runs_nothing(text: str) -> None:
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= {
        *("html", "head", "meta", "title", "style", "body", "main", "footer", "section"),
        *(
            "h1",
            "h2",
            "p",
            "pre",
            "dl",
            "div",
            "dt",
            "dd",
            "figure",
            "figcaption",
            "strong",
            "span",
        ),
        *("svg", "desc", "path", "table", "caption", "thead", "tbody", "tr", "th", "td"),
    }
    names = {name for _, attributes in page.tags for name in attributes}
    assert not {name for name in names if name.startswith("on")} | names & {"src", "href"}
    assert not re.search(r"@import|url\(", text)


def test_what_others_wrote_is_shown_and_does_nothing(text: str) -> None:
    cells = Page(text).within("td")
    assert "<script>alert(1)</script> & | `x` password=***" in cells
    assert "<img src=x onerror=alert(1)> https://joe:***@example.org" in " ".join(cells)
    assert "sync:remove(name='<i>scratch</i>')" in cells
    assert "hunter2" not in text
    assert "s3cr3t" not in text


def test_each_plot_says_in_words_what_it_shows(text: str) -> None:
    page = Page(text)
    plots = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert {attributes["role"] for attributes in plots} == {"img"}
    assert len(plots) == len(page.within("desc")) == len(page.within("title")) - 1
    titles = page.within("strong")
    assert titles[:2] == ["Records per second", "Batch durations"]
    assert titles[-1] == "Attempts and health"
    assert "dependencies bad for 0 s" in page.within("desc")[-1]


def test_each_table_has_a_caption_and_the_name_of_a_column_in_each_cell(text: str) -> None:
    page = Page(text)
    tables = [tag for tag, _ in page.tags].count("table")
    assert len(page.within("caption")) == tables == len(SECTIONS) - 2  # no operations, no plots
    assert "Attempts, 2 rows" in page.within("caption")
    headings = set(page.within("th"))
    assert {a["title"] for tag, a in page.tags if tag == "td"} == headings


def test_an_attempt_that_failed_and_the_gap_after_it_are_marked(text: str) -> None:
    bands = re.findall(r'<path class="(\w+)"', text.rpartition("<figure>")[2])
    assert bands == ["gap", "grid", "ok", "bad"]


def test_a_run_that_stopped_says_what_to_type_from_anywhere(project: Project) -> None:
    job = "from batchrun import job\n@job\ndef sync(ctx):\n    yield from ctx.batches(range(50))\n"
    project.write("[jobs.sync]\nbatch_size = 10\n", sync=job)
    assert project.run("run", "sync", "--batches", "1").code == 75
    config = str(project.folder / "batchrun.toml")
    page = project.outputs / "a.html"
    words = ("--config", config, "report", "sync", "--html", str(page))
    assert project.run(*words, cwd=Path("/")) == Ended(0, f"written: {page}\n", "")
    run = project.run("report", "sync", "--json").document["id"]
    shown = Page(page.read_text(encoding="utf-8")).within("pre")
    assert shown == [f"batchrun --config {config} resume {run}"]


def test_the_json_of_a_report_has_what_the_page_shows(shop: Project) -> None:
    document = shop.run("report", "sync", "--json").document
    assert {"until_at", "duration_s", "at_work_s", "records_per_s"} <= document.keys()
    assert {"batch_p95_s", "span_s", "operations", "open_operations"} <= document.keys()
    assert document["next"] == f"batchrun report {document['id']}"
    spans = document["spans"]
    assert sum(span["records"] or 0 for span in spans) == document["read"] == 50
    assert sum(span["batches"] for span in spans) == document["batches"] == 5
    worked = [span for span in spans if span["batches"]]
    assert all(span["shortest_s"] <= span["mean_s"] <= span["longest_s"] for span in worked)


def test_operations_are_counted_and_those_of_unknown_outcome_are_named(tmp_path: Path) -> None:
    with long_run(tmp_path, 10) as ledger:
        run = ledger.run(1)
        summary = batchrun.summarise(run, [], [], []) | ledger.course(run)
    summary |= {"why": "", "next": "", "operations": [{"outcome": "done", "operations": 1200}]}
    [done] = [p for p in batchrun.sheet_of_run(summary).parts if p.title == "Operations"]
    assert done == batchrun.Part("Operations", [], pairs=[("done", "1,200")])
    unknown = {"key": "mail/<7>", "claimed_at": "2026-01-31T10:00:00.000Z", "why": "TimeoutError"}
    sheet = batchrun.sheet_of_run(summary | {"open_operations": [unknown]})
    text = batchrun.render_html(sheet, "2026-01-31T10:00:00.000Z")
    assert Page(text).within("pre") == ["batchrun reconcile r1"]
    assert Page(text).within("td")[:3] == ["mail/<7>", "2026-01-31 10:00:00Z", "TimeoutError"]


def test_a_table_of_many_rows_is_cut_and_says_so() -> None:
    rows = [[str(n)] for n in range(250)]
    part = batchrun.listed("Events", ["n"], rows)
    assert part.lines == ["The newest 100 of 250; --json has all."]
    assert part.table == [["n"], *rows[150:]]
    assert batchrun.listed("Rejects", ["n"], rows, first=True).table == [["n"], *rows[:100]]


# --- where it is written --------------------------------------------------------------------------

REFUSED = """\
A report cannot be written to {}.
It takes the place of an older report or of no file, in a folder that is there.
Nothing was written.
Name another file: --html report.html"""


@pytest.mark.parametrize(
    "name", ["-", ".", "nowhere/a.html", "batchrun.toml", "state/ledger.db", "/dev/null", "pipe"]
)
def test_a_report_takes_the_place_of_nothing_but_a_report(
    shop: Project, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shop.folder)
    if not Path("pipe").exists():
        os.mkfifo("pipe")
    with pytest.raises(batchrun.ConfigurationError) as refusal:
        batchrun.place_of_report(name)
    assert str(refusal.value) == REFUSED.format(name)


def test_the_ledger_is_left_as_it_is_when_it_is_named_by_mistake(shop: Project) -> None:
    ledger = shop.state / "ledger.db"
    before = ledger.stat()
    refusal = f"{REFUSED.format('state/ledger.db')}\n"
    assert shop.run("report", "sync", "--html", "state/ledger.db") == Ended(2, "", refusal)
    now = ledger.stat()
    assert (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_an_older_report_is_replaced_through_a_link_and_the_umask_says_who_reads(
    shop: Project, text: str
) -> None:
    path, link = shop.folder / "old.html", shop.folder / "latest.html"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    link.symlink_to(path.name)
    for umask, mode in ((0o022, 0o644), (0o077, 0o600)):
        ended = shop.run("report", "sync", "--html", "latest.html", "--json", umask=umask)
        size = path.stat().st_size
        assert ended.document == {"html": str(path), "bytes": size}
        assert (link.is_symlink(), path.stat().st_mode & 0o777) == (True, mode)
    leftovers = [each.name for each in shop.folder.iterdir() if each.name.startswith(".")]
    assert leftovers == []


# --- Markdown -------------------------------------------------------------------------------------


def test_markdown_has_the_same_sections_and_escapes_what_others_wrote(shop: Project) -> None:
    ended = shop.run("report", "sync", "--markdown")
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0] == "# sync: succeeded"
    assert [line[3:] for line in lines if line.startswith("## ")][1:] == SECTIONS
    assert "- **records read**: 50 of 50" in lines
    reason = r"\<script\>alert(1)\</script\> \& \| \`x\` password=***"
    [run] = [line.split()[-1] for line in lines if line.startswith("    batchrun rejects list")]
    assert lines[2] == f"## Run {run}"
    assert f"| 1 | 4 | main | open | 33 | {reason} |" in lines


def test_text_that_would_turn_a_line_around_or_ring_a_bell_is_made_harmless() -> None:
    shown = r"a\x07\x1b[1m\u202eb" + "\t" + r"c\ud800"
    assert batchrun.as_html("a\x07\x1b[1m\u202eb\tc\ud800") == shown
    assert batchrun.as_markdown("a\n# b  *c*") == r"a \# b \*c\*"
    starts = {"- a": r"\- a", "+ a": r"\+ a", "1. a": r"1\. a", "2) a": r"2\) a", "==": r"\=="}
    starts |= {"13.5 ms": "13.5 ms", "-": "-", "-5": "-5", "--": r"\--"}
    assert {start: batchrun.as_markdown(start) for start in starts} == starts
    assert batchrun.as_html("password=hunter2 <b>") == "password=*** &lt;b&gt;"
    assert batchrun.as_html('<a href="x">&') == "&lt;a href=&quot;x&quot;&gt;&amp;"


# --- many batches ---------------------------------------------------------------------------------


@contextlib.contextmanager
def long_run(folder: Path, batches: int) -> Iterator[Ledger]:
    """Yield a ledger with one run of many batches, a second each, with readings and checks."""
    folder.chmod(0o700)
    path = folder / "ledger.db"
    open_ledger(path, Host(), create=True).close()
    at = "strftime('%Y-%m-%dT%H:%M:%fZ', '2026-01-01', {})"
    count = f"WITH n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < {batches})"
    begun, end = at.format("'0 seconds'"), at.format(f"'+{batches} seconds'")
    now = at.format("'+' || n || ' seconds'")
    owner = json.dumps({"pid": 1, "ticks": 1, "boot_id": "a"})
    with contextlib.closing(apsw.Connection(str(path))) as connection, connection:
        connection.execute(
            "INSERT INTO run (id, job, state, generation, created_at, changed_at, number, batches,"
            f" read) VALUES ('r1', 'sync', 'reserved', 1, {begun}, {end}, {batches}, {batches},"
            f" {batches * 100})"
        )
        connection.execute(
            "INSERT INTO attempt (run, generation, supervisor, began_at, from_number)"
            f" VALUES (1, 1, '{owner}', {begun}, 0)"
        )
        connection.execute(
            f"{count} INSERT INTO batch (run, number, generation, kind, loop, cursor, read,"
            " rejected, counts, hash, at, elapsed_s, rss_bytes)"
            " SELECT 1, n, 1, 'batch', 'main', '', 100, 0,"
            f" '{{}}', '', {now}, n / {batches}.0, n FROM n"
        )
        for table, columns, values in (
            ("reading", "number, available_bytes, connections", "n, 1000, 3"),
            (
                "health_check",
                "memory, connections, dependencies, verdict, why, elapsed_s",
                "iif(n = 7, 'bad: x', 'ok: x'), 'ok: x', 'unknown: x', '', '', 0",
            ),
        ):
            connection.execute(
                f"{count} INSERT INTO {table} (at, run, generation, {columns})"
                f" SELECT {now}, 1, 1, {values} FROM n WHERE n % 60 = 7"
            )
    ledger = open_ledger(path, Host(), create=False, write=False)
    yield ledger
    ledger.close()


def test_a_report_of_100000_batches_fetches_few_rows_and_is_a_small_page(tmp_path: Path) -> None:
    fetched = 0

    def count(_: apsw.Cursor, row: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal fetched
        fetched += 1
        return row

    with long_run(tmp_path, 100_000) as ledger:
        ledger._connection.row_trace = count
        course = ledger.course(ledger.run(1))
        ledger._connection.row_trace = None
        rows = [ledger.run(1), ledger.attempts(ledger.run(1)), [], []]
    assert len(course["spans"]) == batchrun.SPANS_MOST
    assert fetched == len(course["spans"]) + 3  # the run, its summary, the 95th percentile
    assert sum(span["records"] for span in course["spans"]) == 10_000_000
    assert course["batch_p95_s"] == 0.95
    assert (course["spans"][0]["memory"], course["spans"][-1]["memory"]) == ("bad", "ok")
    assert course["spans"][-1]["rss_bytes"] == 100_000
    summary: dict[str, Any] = batchrun.summarise(*rows) | course | {"why": "", "next": ""}  # type: ignore[arg-type]
    text = batchrun.render_html(batchrun.sheet_of_run(summary), "2026-01-02T00:00:00.000Z")
    assert len(text.encode()) < 100_000
    assert len(re.findall("M", text)) < 20 * batchrun.SPANS_MOST  # boxes of all plots together
    Page(text)


def test_no_span_of_time_is_shorter_than_five_batches(tmp_path: Path) -> None:
    """Else the plot of a steady run would show where spans begin, and no change of its rate."""
    with long_run(tmp_path, 100) as ledger:
        course = ledger.course(ledger.run(1))
    assert course["span_s"] == pytest.approx(5.0, rel=0.02)
    assert {span["batches"] for span in course["spans"][1:-1]} <= {4, 5, 6}


# --- a comparison of runs -------------------------------------------------------------------------


def compared(
    run: str, job: str, duration_s: float, rate: float | None, **more: object
) -> dict[str, Any]:
    """Make a row of the view run_summary."""
    return {
        "run": run,
        "job": job,
        "state": "succeeded",
        "reason": "",
        "began_at": "2026-01-31T02:00:00.000Z",
        "records": 1000,
        "rejected": 0,
        "attempts": 1,
        "paused_s": 0.0,
        "retry_of": None,
        "rollback_of": None,
        "duration_s": duration_s,
        "records_per_s": rate,
        **more,
    }


COMPARED = """\
All jobs since 2026-01-01 00:00:00Z

a
4 runs, of them 3 succeeded; the median of those: 1m40s, 10 records/s.
run  began (UTC)           how it ended                 records  took                 records/s
r4   2026-01-31 02:00:00Z  retry of rejects, succeeded  1,000    30 s -70% ##         50 +400% ####
r3   2026-01-31 02:00:00Z  succeeded                    1,000    2m00s +20% ########  10 +0% ##
r2   2026-01-31 02:00:00Z  succeeded                    1,000    1m40s +0% #######    10 +0% ##
r1   2026-01-31 02:00:00Z  succeeded                    1,000    1m00s -40% ####      20 +100% ###

b
1 run, of them 0 succeeded; the median of those: -, - records/s.
run  began (UTC)           how it ended  records  took          records/s  rejected  attempts
r5   2026-01-31 02:00:00Z  waiting       1,000    5 s ########  -          0         1"""


def test_runs_are_compared_with_the_median_of_those_of_their_job_that_succeeded_whole() -> None:
    rows = [
        compared("r5", "b", 5.0, None, state="waiting"),
        compared("r4", "a", 30.0, 50.0, retry_of="r3", rejected=2),
        compared("r3", "a", 120.0, 10.0, attempts=3, paused_s=61.0),
        compared("r2", "a", 100.0, 10.0),
        compared("r1", "a", 60.0, 20.0),
    ]
    document = batchrun.summarise_runs(rows, "2026-01-01T00:00:00.000Z", None)
    sheet = batchrun.sheet_of_runs(document)
    shown = batchrun.render_sheet(sheet).splitlines()
    for told, line in zip(COMPARED.splitlines(), shown, strict=True):
        assert line.startswith(told)  # the rest is below
    [_, r4, r3, _, _] = sheet.parts[0].table
    assert [str(cell) for cell in r4[-3:]] == ["2", "1", "0 s"]
    assert [str(cell) for cell in r3[-3:]] == ["0", "3", "1m01s"]


def test_runs_since_a_moment_are_compared_in_each_form(shop: Project) -> None:
    document = shop.run("report", "sync", "--since", "1d", "--json").document
    assert [(run["job"], run["duration_s_change"]) for run in document["runs"]] == [("sync", 0.0)]
    assert document["jobs"]["sync"]["succeeded"] == 1
    assert "1 run, of them 1 succeeded" in shop.run("report", "--since", "1d").out
    assert "| --- |" in shop.run("report", "--since", "1d", "--markdown").out
    assert shop.run("report", "--since", "1d", "--html", "c.html").code == 0
    page = Page((shop.folder / "c.html").read_text(encoding="utf-8"))
    assert page.within("h2") == ["sync"]
    assert {a["style"] for tag, a in page.tags if tag == "i"} == {"width:100%"}
    nothing = shop.run("report", "--since", "0").out.splitlines()
    assert re.fullmatch(r"No run began since 20\S+ \S+Z\.", nothing[-1])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("report", "A report is of a run, or --since a moment; in one of its forms.\nFORMS"),
        (
            "report sync --markdown --html a.html",
            "A report is of a run, or --since a moment; in one of its forms.\nFORMS",
        ),
        (
            "report --since 30",
            """--since '30' is neither a duration nor a moment.
Nothing was changed.
Write: --since 30m, or --since 2026-01-31T17:30""",
        ),
    ],
)
def test_words_that_ask_for_no_report_are_refused(shop: Project, words: str, said: str) -> None:
    said = said.replace("FORMS", "Write: batchrun report RUN --html FILE")
    assert shop.run(*words.split()) == Ended(2, "", f"{said}\n")


# --- plots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top", "end", "texts"),
    [
        (0, 0.2, ["0", "0.2"]),
        (3, 3.0, ["0", "1", "2", "3"]),
        (4.2, 5.0, ["0", "1", "2", "3", "4", "5"]),
        (0.0062, 0.008, ["0", "0.002", "0.004", "0.006", "0.008"]),
        (1001, 1500.0, ["0", "500", "1,000", "1,500"]),
        (9.9e9, 1e10, ["0", *(f"{n},000,000,000" for n in (2, 4, 6, 8, 10))]),
    ],
)
def test_an_axis_has_round_ticks_and_room(top: float, end: float, texts: list[str]) -> None:
    found, ticks = batchrun.up_to(top, batchrun.number_text)
    assert found == pytest.approx(end)
    assert [text for _, text in ticks] == texts
    assert (ticks[0][0], ticks[-1][0]) == (0, 1)


@pytest.mark.parametrize(
    ("until_s", "texts"),
    [
        (4, ["22:59:58", "22:59:59", "23:00:00", "23:00:01", "23:00:02"]),
        (3 * 3600, ["23:00", "23:30", "31 Jan", "00:30", "01:00", "01:30"]),
        (40 * 86_400, ["05 Feb", "12 Feb", "19 Feb", "26 Feb", "05 Mar"]),
    ],
)
def test_the_time_axis_has_round_moments_in_utc(until_s: float, texts: list[str]) -> None:
    sheet = Sheet("", [], "2026-01-30T22:59:58.000Z", until_s)
    assert [text for _, text in batchrun.times_of(sheet)] == texts


def test_an_amount_reaches_back_to_the_one_before_and_a_check_on_to_the_next_over_no_gap() -> None:
    sheet = Sheet("", [], "2026-01-30T00:00:00.000Z", 100.0, [(25.0, 62.0)])
    spans = [{"at_s": at_s} for at_s in (0.0, 20.0, 70.0, 90.0)]
    back = [pair[:2] for pair in batchrun.stretched(sheet, spans, 10.0)]
    assert back == [(0.0, 10.0), (10.0, 30.0), (62.0, 80.0), (80.0, 100.0)]
    ahead = [pair[:2] for pair in batchrun.stretched(sheet, spans, 10.0, forward=True)]
    assert ahead == [(0.0, 20.0), (20.0, 30.0), (70.0, 90.0), (90.0, 100.0)]


# --- in a browser ---------------------------------------------------------------------------------

LOOK = """\
<!doctype html><body><script>
addEventListener("message", event => document.body.append(event.data + ";"))
</script>{}</body>"""
MEASURE = """<script>
parent.postMessage([innerWidth, document.documentElement.scrollWidth <= innerWidth,
  getComputedStyle(document.body).backgroundColor, document.querySelectorAll("path").length > 9,
  document.querySelector("thead") && getComputedStyle(document.querySelector("thead")).display]
  .join(" "), "*")
</script></body>"""


@pytest.mark.slow
def test_a_browser_shows_it_on_a_phone_and_a_desk_in_light_and_dark(
    text: str, tmp_path: Path
) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("NO BROWSER: neither chromium nor google-chrome is here to look at the page")
    measured = tmp_path / "measured.html"
    measured.write_text(text.replace("</body>", MEASURE), encoding="utf-8")
    frames = (f'<iframe src="{measured.as_uri()}" width="{w}"></iframe>' for w in (360, 961, 1280))
    look = tmp_path / "look.html"
    look.write_text(LOOK.format("".join(frames)), encoding="utf-8")
    for scheme, colour in ((1, "rgb(255, 255, 255)"), (0, "rgb(20, 24, 29)")):
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
        words += [f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom"]
        words += [f"--blink-settings=preferredColorScheme={scheme}", look.as_uri()]
        told = subprocess.run(
            [browser, *words], capture_output=True, text=True, timeout=60, check=True
        )
        found = sorted(re.findall(r"(\d+) (\w+) (rgb\(.*?\)) (\w+) ([\w-]+);", told.stdout))
        assert found == [
            ("1280", "true", colour, "true", "table-header-group"),
            ("360", "true", colour, "true", "none"),
            ("961", "true", colour, "true", "table-header-group"),
        ]
