"""`status`, `status --watch` and `jobs`: what a person sees, on terminals of any width."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator
from typing import Any
from unicodedata import east_asian_width

import apsw
import pytest
from conftest import LAUNCH, Project, clean_environment, run_in_two_attempts, wait_for
from test_13_reports import ABOUT, NEVER, NOW, PAUSED, RUN, STANDS

import batchrun
from batchrun import Event, Lockfile, RunState, Standing

CONFIG = """
[jobs.count]
batch_size = 10
"""
COUNT = """
    import pathlib, time
    from batchrun import job

    @job()
    def count(ctx):
        for batch in ctx.batches(range(100)):
            if batch.number == 4:
                pathlib.Path("held").touch()
                while pathlib.Path("hold").exists() and not ctx.should_stop:
                    time.sleep(0.01)
                ACTION
            time.sleep(0.005)  # so that a rate can be told
            yield batch
    """


def write_job(project: Project, action: str = "pass", config: str = CONFIG) -> None:
    """Write the job that stays in its fourth batch while there is a file `hold`."""
    project.write(config, count=COUNT.replace("ACTION", action))


@pytest.fixture
def held(project: Project) -> Project:
    """A project whose run stands in its fourth batch until `hold` is removed."""
    write_job(project)
    (project.folder / "hold").touch()
    project.start("run", "count")
    wait_for((project.folder / "held").exists, "the fourth batch")
    return project


def let_go(project: Project) -> None:
    """Let the held run go on to its end."""
    (project.folder / "hold").unlink()
    assert project.finish(project.started[0]).code == 0


# --- a terminal -----------------------------------------------------------------------------------


# The terminal becomes the one that Ctrl-C comes from.
AT_A_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "


class Terminal:
    """A terminal with a command in it."""

    def __init__(self, project: Project, *words: str, columns: int = 80, **env: str) -> None:
        self.screen, self.inner = pty.openpty()
        self.shown = b""
        self.resize(columns)
        self.before = termios.tcgetattr(self.inner)
        self.process = subprocess.Popen(
            [*LAUNCH[:3], AT_A_TERMINAL + LAUNCH[3], *words],
            cwd=project.folder,
            env={**clean_environment(), "TERM": "xterm", **env},
            stdin=self.inner,
            stdout=self.inner,
            stderr=self.inner,
            start_new_session=True,
        )

    def resize(self, columns: int) -> None:
        """Give the terminal so many columns and 40 lines."""
        fcntl.ioctl(self.inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def look(self, what: str, *, afresh: bool = False) -> str:
        """Return all that was shown, when this is in it; `afresh`: shown from now on."""
        self.shown = b"" if afresh else self.shown

        def is_shown() -> bool:
            while select.select([self.screen], [], [], 0)[0]:
                self.shown += os.read(self.screen, 65_536)
            return what.encode() in self.shown

        wait_for(is_shown, f"{what!r} on the terminal")
        return self.shown.decode()

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self.screen, keys)

    def ends(self) -> int:
        """Return the exit code, when the command has ended; all that it showed is kept."""

        def has_ended() -> bool:
            while select.select([self.screen], [], [], 0)[0]:
                self.shown += os.read(self.screen, 65_536)
            return self.process.poll() is not None

        wait_for(has_ended, "the end of the command")
        while select.select([self.screen], [], [], 0)[0]:
            self.shown += os.read(self.screen, 65_536)
        return self.process.wait()

    def close(self) -> None:
        """Take the terminal away."""
        for end in (self.screen, self.inner):
            if end >= 0:
                os.close(end)
        self.screen = self.inner = -1


Open = Callable[..., Terminal]


@pytest.fixture
def terminal() -> Iterator[Open]:
    """Opens terminals; those left are closed and their commands killed."""
    opened: list[Terminal] = []

    def start(*words: Any, **how: Any) -> Terminal:  # noqa: ANN401 - those of Terminal
        opened.append(Terminal(*words, **how))
        return opened[-1]

    yield start
    for each in opened:
        each.process.kill()
        each.process.wait()
        each.close()


def width(line: str) -> int:
    """Return how many columns a line takes, escapes left out."""
    text = re.sub(r"\x1b\[[0-9?;]*[A-Za-z]|\r", "", line)
    return sum(1 + (east_asian_width(character) in "WF") for character in text)


def test_ctrl_c_is_answered_in_a_line_of_its_own_above_the_live_line(
    project: Project, terminal: Open
) -> None:
    at, go = project.folder / "at", project.folder / "go"
    wait = "while not pathlib.Path('go').exists(): time.sleep(0.01)"
    write_job(project, f"pathlib.Path('at').touch()\n                {wait}")
    run = terminal(project, "run", "count")
    wait_for(at.exists, "the fourth batch")
    run.look("count [####")
    run.type(b"\x03")
    run.look("\r\x1b[Kstopping after this batch; Ctrl-C again interrupts it\r\n\r\x1b[Kcount [####")
    go.touch()
    assert run.ends() == 130
    assert run.shown.count(b"stopping") == 1


# --- all jobs -------------------------------------------------------------------------------------


WIDE = "job state for batches records of done rate left success skipped".split()  # noqa: SIM905


def crowd() -> list[dict[str, Any]]:
    """Return forty jobs in all states, with long names, large numbers and every column in use."""
    jobs = []
    for number in range(40):
        state = list(RunState)[number % len(RunState)]
        run = RUN._replace(
            job=f"job_{number:02d}_" + "x" * 57 * (number % 2),
            state=state,
            reason="maintenance",
            read=123_456_789,
            expected=987_654_321,
        )
        stands = Standing(state, "", f"batchrun resume {run.id}", needs_someone=number == 7)
        success = RUN._replace(ended_at="2026-01-30T20:01:00.000Z")
        jobs.append(batchrun.summarise_job(run.job, run, stands, success, 99, rate=12_345.6))
    return jobs


@pytest.mark.parametrize("columns", [40, 80, 160, 200])
def test_forty_jobs_with_long_names_are_forty_lines_that_fit(columns: int) -> None:
    lines = batchrun.render_status(crowd(), NOW, columns).splitlines()
    table, todos = lines[:41], lines[41:]
    assert max(map(width, table)) <= columns
    numbers = [7, *(number for number in range(40) if number != 7)]  # the 7th needs someone
    assert [line.removeprefix("! ")[:6] for line in table[1:]] == [f"job_{n:02d}" for n in numbers]
    assert len(todos) == 40
    assert todos[0].startswith("to type for job_07_xxx")
    assert (table[0].split() == WIDE) == (columns >= 160)


def test_a_narrow_table_does_without_what_matters_least() -> None:
    heads = {
        columns: batchrun.render_status(crowd()[::2], NOW, columns).splitlines()[0].split()
        for columns in (120, 100, 80, 60)
    }
    assert heads == {
        120: WIDE,
        100: ["job", "state", "for", "records", "done", "rate", "left", "success", "skipped"],
        80: ["job", "state", "for", "records", "done", "left", "success"],
        60: ["job", "state", "for", "records"],
    }


def test_columns_that_say_nothing_are_left_out() -> None:
    assert batchrun.render_status([NEVER], NOW) == (
        "job     state      skipped\n"
        "prices  never run  12\n"
        "to type: batchrun run prices"
    )  # fmt: skip
    assert batchrun.render_status([], NOW) == "job"


def test_a_run_that_goes_on_has_a_rate_and_a_time_left_and_nothing_to_type() -> None:
    stands = Standing(RunState.RUNNING, "", "batchrun pause a1b2c3d4e5")
    run = RUN._replace(state=RunState.RUNNING, reason="")
    job = batchrun.summarise_job("stock", run, stands, None, 0, rate=100.0)
    assert (job["records_per_s"], job["left_s"]) == (100.0, 140.0)
    assert batchrun.render_status([job], NOW, 80) == (
        "job    state    for    batches  records  of      done  rate   left\n"
        "stock  running  2m00s  2        10,000   24,000  42%   100/s  2m20s"
    )


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("stock", 5, "stock"),
        ("stocks", 5, "st..."),
        ("caf\u00e9s", 5, "caf\u00e9s"),
        ("\u65e5\u672c\u8a9e", 6, "\u65e5\u672c\u8a9e"),
        ("\u65e5\u672c\u8a9e", 5, "\u65e5..."),
        ("e\u0301" * 5, 5, "e\u0301" * 5),
        ("stocks", 2, ".."),
    ],
)
def test_text_is_cut_by_the_columns_it_takes(text: str, columns: int, shown: str) -> None:
    assert batchrun.cut(text, columns) == shown


@pytest.mark.parametrize("columns", [80, 160])
def test_status_fits_the_terminal_it_is_shown_on(
    project: Project, terminal: Open, columns: int
) -> None:
    more = "".join(f"\n[jobs.{'x' * 60}{number}]\nuses = 'count'\n" for number in range(3))
    write_job(project, config=CONFIG + more)
    assert project.run("run", "count", "--batches", "2").code == 75
    shown = terminal(project, "status", columns=columns)
    assert shown.ends() == 0
    lines = shown.look("to type").replace("\r", "").split("\n")
    table = lines[lines.index(next(line for line in lines if line.startswith("job "))) :][:5]
    assert max(map(width, table)) <= columns
    assert "\x1b" not in shown.shown.decode()


# --- one job --------------------------------------------------------------------------------------


def test_one_job_is_told_on_one_screen(held: Project) -> None:
    shown = held.run("status", "count")
    lines = shown.out.splitlines()
    assert (shown.code, len(lines) < 24) == (0, True)
    first = r"^count: running since \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ$"
    assert re.search(first, shown.out, re.MULTILINE)
    about = {line[:16].strip(): line[16:] for line in lines if line.startswith("  ")}
    assert re.fullmatch(r"\w{10}, owned by pid \d+ \(for \d+s\) and pid .*", about["run"])
    assert re.fullmatch(r"30 of 100, [\d,]+/s, 0s left", about["records"])
    assert re.fullmatch(
        r"3, newest commit \d+s ago, median 0\.\d\d s, 95th percentile 0\.\d\d s", about["batches"]
    )
    assert about["loops"].startswith("now loop main")
    assert about["attempt"].startswith("1  20")
    assert ": going on, or left by its owner, commits 3, peak" in about["attempt"]
    assert lines[-1].startswith("to type: batchrun logs -f ")
    let_go(held)
    done = held.run("status", "count").out
    assert "owned by" not in done
    assert done.splitlines()[-1].startswith("to type: batchrun report ")


def test_a_process_that_is_supervisor_and_worker_is_named_once(project: Project) -> None:
    write_job(project)
    (project.folder / "hold").touch()
    process = project.start("run", "count", "--in-process")
    wait_for((project.folder / "held").exists, "the fourth batch")
    shown = project.run("status", "count").out
    assert re.search(rf", owned by pid {process.pid} \(for \d+s\)$", shown, re.MULTILINE)
    let_go(project)


def test_the_page_of_one_job_is_json_too(held: Project) -> None:
    (job,) = held.run("--json", "status", "count").document["jobs"]
    assert job["batches"] == 3
    assert job["records_per_s"] > 0
    assert job["about"]["attempts"][0]["supervisor"]["pid"] == held.started[0].pid
    assert {"operations", "rejects", "cleanups", "course", "owners"} <= job["about"].keys()
    let_go(held)


def test_a_job_cannot_command_the_terminal_that_shows_its_error(project: Project) -> None:
    write_job(project, r"raise ValueError('\x1b[31mred\x07 \u65e5\u672c \u202e\x9b')")
    assert project.run("run", "count").code == 1
    for words in (["status", "count"], ["report", "count"], ["logs", "count"]):
        ended = project.run(*words)
        assert r"\x1b[31mred\x07 日本 \u202e\x9b" in ended.out
        assert not {"\x1b", "\x07", "\u202e", "\x9b"} & {*ended.out}


def test_what_would_keep_an_idle_run_from_going_on_is_named(project: Project) -> None:
    write_job(project)
    assert project.run("run", "count", "--batches", "2").code == 75
    write_job(project, config=CONFIG + "fed = 1\n")
    ended = project.run("status", "count")
    assert ended.code == 3
    why = r"^  why +run \w{10} of count could not go on: .*fed is given"
    assert re.search(why, ended.out, re.MULTILINE)
    assert project.run("status").code == 0  # it looks into no job's file
    with (project.state / "locks/count.lock").open():
        said = f"  why           The job's lock is held by pid {os.getpid()}.\n"
        assert said in project.run("status", "count").out


def test_a_run_that_was_refused_as_it_is_installed_needs_someone_in_each_view(
    project: Project,
) -> None:
    write_job(project)
    assert project.run("run", "count", "--batches", "2").code == 75
    write_job(project, config=CONFIG + "fed = 1\n")
    assert project.run("run", "count").code == 2
    for words in (["status"], ["status", "count"]):
        ended = project.run(*words, "--json")
        assert (ended.code, ended.document["jobs"][0]["needs_someone"]) == (3, True)
    table = project.run("status").out
    assert re.search(r"^! count  interrupted ", table, re.MULTILINE)
    write_job(project)
    assert project.run("resume", "--all").code == 0
    assert project.run("status").code == 0


@pytest.mark.parametrize(
    ("scopes", "off"),
    [
        ([], "batchrun maintenance off && "),
        (["--job", "count"], "batchrun maintenance off && "),
        (["--job", "other"], ""),
    ],
)
def test_what_maintenance_would_refuse_is_not_told_to_be_typed(
    project: Project, scopes: list[str], off: str
) -> None:
    write_job(project, config=CONFIG + "[jobs.other]\nuses = 'count'\n")
    assert project.run("run", "count", "--batches", "2").code == 75
    assert project.run("maintenance", "on", *scopes).code == 0
    shown = project.run("status", "count").out
    run = project.run("--json", "status", "count").document["jobs"][0]["run"]
    assert shown.splitlines()[-1] == f"to type: {off}batchrun resume {run}"
    why = "  why           Maintenance is on and closes the job: nothing of it starts.\n"
    assert (why in shown) == bool(off)
    assert "to type for other" not in project.run("status").out  # nothing of it has begun


def test_a_maintenance_changes_nothing_of_what_it_does_not_refuse() -> None:
    stands = STANDS._replace(todo='batchrun approve a1b2c3d4e5 prices --why "..."')
    assert batchrun.closed_standing(stands, closed=True) == stands


# --- the live view --------------------------------------------------------------------------------


def test_the_live_view_shows_bar_rate_gauges_and_events_and_quits_on_q(
    held: Project, terminal: Open
) -> None:
    watch = terminal(held, "status", "--watch", "count")
    shown = watch.look("to type: batchrun logs -f")
    frame = re.sub("\x1b\\[K|\r", "", shown.split("\x1b[H")[1]).split("\n")
    assert max(map(width, frame)) <= 80
    assert frame[0].endswith("Z  q quits")
    assert re.search(r"^\[#{14}-{34}\]  30%  0s left", "\n".join(frame), re.MULTILINE)
    assert "batchrun: running: the worker" in watch.look("batchrun: running")
    watch.type(b"q")
    assert watch.ends() == 0
    assert watch.shown.endswith(b"\x1b[?25h\x1b[?1049l")
    assert termios.tcgetattr(watch.inner) == watch.before
    let_go(held)


def test_the_live_view_of_all_jobs_follows_the_size_of_the_terminal(
    held: Project, terminal: Open
) -> None:
    watch = terminal(held, "status", "--watch")
    first = watch.look("count")
    assert first.startswith("\x1b[?1049h\x1b[?25l")
    watch.resize(30)
    watch.look("\x1b[H", afresh=True)
    watch.look("\x1b[J")
    lines = watch.shown.decode().split("\x1b[H")[-1].split("\n")
    assert max(map(width, lines)) <= 30
    assert any(line.startswith("count") for line in lines)
    watch.type(b"\x03")
    assert watch.ends() == 0
    assert termios.tcgetattr(watch.inner) == watch.before
    let_go(held)


def test_a_signal_gives_the_terminal_back_too(held: Project, terminal: Open) -> None:
    watch = terminal(held, "status", "--watch")
    watch.look("count")
    watch.process.send_signal(signal.SIGTERM)
    assert watch.ends() == 0
    assert termios.tcgetattr(watch.inner) == watch.before
    assert watch.shown.endswith(b"\x1b[?25h\x1b[?1049l")


def test_a_terminal_that_goes_away_ends_the_view(held: Project, terminal: Open) -> None:
    watch = terminal(held, "status", "--watch")
    watch.look("count")
    watch.close()
    assert watch.process.wait(30) == 0


def test_the_view_ends_with_words_if_the_ledger_goes_away(project: Project, terminal: Open) -> None:
    write_job(project)
    assert project.run("run", "count").code == 0
    watch = terminal(project, "status", "--watch")
    watch.look("count")
    (project.folder / "state").rename(project.folder / "gone")
    assert watch.ends() == 4
    assert "There is no state directory" in watch.shown.decode().rpartition("\x1b[?1049l")[2]


@pytest.mark.parametrize("how", ["pipe", "dumb", "json"])
def test_without_a_terminal_it_is_said_what_to_type_instead(
    held: Project, terminal: Open, how: str
) -> None:
    words = (["--json"] if how == "json" else []) + ["status", "--watch", "count"]
    if how == "pipe":
        ended = held.run(*words)
        code, shown = ended.code, ended.err
    else:
        watch = terminal(held, *words, TERM="dumb" if how == "dumb" else "xterm")
        code = watch.ends()
        shown = watch.shown.decode().replace("\\n", "\n")
    assert code == 2
    assert "status --watch draws on a terminal, and here is none" in shown
    assert "Type: batchrun status count" in shown


def test_a_view_keeps_nobody_from_emptying_the_ledgers_log(held: Project, terminal: Open) -> None:
    watch = terminal(held, "status", "--watch", "count")
    watch.look("count")

    def is_emptied() -> bool:
        with contextlib.closing(apsw.Connection(str(held.state / "ledger.db"))) as ledger:
            ledger.execute("SELECT uuid FROM ledger").fetchall()  # so that it knows of the log
            try:
                ledger.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            except apsw.BusyError:
                return False
        return (held.state / "ledger.db-wal").stat().st_size == 0

    wait_for(is_emptied, "an empty log of the ledger")
    let_go(held)
    watch.look("count: succeeded for")


def live_job() -> dict[str, Any]:
    """Return a job as the live view has it."""
    event = Event(7, NOW, RUN.id, "stock", "worker", "said", "a line\nof two")
    live = {
        "events": [str(batchrun.event_line(event))],
        "rss_bytes": [1, None, 8],
        "connections": [0],
    }
    return {**PAUSED, "about": ABOUT, "live": live}


@pytest.mark.parametrize(("bars", "line"), [(batchrun.BARS, "▂▁█"), (batchrun.PLAIN_BARS, "._#")])
def test_a_sparkline_goes_from_nothing_to_the_largest(bars: str, line: str) -> None:
    lines = batchrun.render_live(live_job(), NOW, 80, bars)
    assert [text for text in lines if "at most" in text] == [f"memory        {line}  at most 8 B"]
    assert lines[2] == f"[{'#' * 20}{'-' * 28}]  42%  "


def test_a_small_screen_keeps_the_head_and_the_newest_events() -> None:
    head, tail = ["one", "two"], ["3", "4", "5"]
    assert batchrun.frame(head, tail, 80, 4) == ["one", "two", "4", "5"]
    assert batchrun.frame(head, tail, 80, 9) == ["one", "two", "3", "4", "5"]
    assert batchrun.frame(head, tail, 2, 1) == [".."]
    assert batchrun.frame(list("abcdef"), [], 80, 4) == [
        *"abc",
        "... and 3 lines more: batchrun status",
    ]
    assert batchrun.frame(["\x1b[2J"], [], 80, 4) == ["\\x1b[2J"]


# --- jobs -----------------------------------------------------------------------------------------


SETTINGS = '''
    from dataclasses import dataclass, field
    from batchrun import Secret, job

    @dataclass(frozen=True)
    class Settings:
        feed: str
        shops: list[str] = field(default_factory=list)
        limit: int | None = 5

    @job(settings=Settings, version=3)
    def sync(ctx):
        """Bring the stock level.

        Once a night.
        """
        for batch in ctx.batches(range(10)):
            yield batch
    '''


def test_jobs_tells_what_each_does_its_settings_and_its_last_run(project: Project) -> None:
    project.write("[jobs.sync]\nfeed = 'x'\n", sync=SETTINGS)
    about = (
        "  Bring the stock level.\n"
        "  feed: str, must be set\n"
        "  shops: list[str] = []\n"
        "  limit: int | None = 5\n"
    )
    assert project.run("jobs").out == f"sync  version 3, never run\n{about}"
    assert project.run("run", "sync").code == 0
    assert re.fullmatch(
        rf"sync  version 3, run \w{{10}} succeeded \d+s ago\n{re.escape(about)}",
        project.run("jobs").out,
    )
    (job,) = project.run("--json", "jobs").document["jobs"]
    assert job["words"] == "Bring the stock level.\n\nOnce a night."
    assert job["last_run"]["state"] == "succeeded"
    assert job["settings"][2] == {"name": "limit", "type": "int | None", "default": "5"}


def test_a_lockfile_of_another_job_closes_nothing() -> None:
    lockfile = Lockfile(1, 1, NOW, "Ada", "", None, ["job:other"], "")
    assert not batchrun.closes(lockfile.scopes, "count", ())


# --- what is longer than a line -------------------------------------------------------------------

REASON = "the quantity is below zero after Monday's correction, which nobody has believed so far"
ERROR = "the supplier's server said a great deal that does not fit on one line, and then hung up"


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose run ended in its second attempt, with much to say about it."""
    log = "ctx.log.warning('%s', 'said ' * 30)"
    made, code = run_in_two_attempts(
        tmp_path_factory.mktemp("wordy"), log, reason=REASON, error=ERROR
    )
    assert code == 10
    return made


@pytest.mark.parametrize("columns", [60, 80, 160])
@pytest.mark.parametrize("words", ["status sync", "logs sync", "rejects show sync"])
def test_a_screen_fits_its_terminal_and_no_word_is_lost(
    wordy: Project, terminal: Open, words: str, columns: int
) -> None:
    open_one = terminal(wordy, *words.split(), columns=columns)
    open_one.ends()
    shown, piped = open_one.shown.decode(), wordy.run(*words.split()).out
    too_long = [line for line in shown.split("\n") if width(line) > columns]
    assert [line for line in too_long if max(map(len, line.split())) < columns - 40] == []  # a path
    moving = r"\d+(\.\d+)?m?s"  # ages
    assert re.sub(moving, "", shown).split() == re.sub(moving, "", piped).split()
    assert max(map(width, piped.split("\n"))) > 90


@pytest.mark.parametrize("columns", [60, 80, 160])
@pytest.mark.parametrize("words", ["report sync", "rejects list sync", "report --since 1d"])
def test_cells_that_do_not_fit_beside_the_others_stand_below_with_their_names(
    wordy: Project, terminal: Open, words: str, columns: int
) -> None:
    open_one = terminal(wordy, *words.split(), columns=columns)
    open_one.ends()
    shown, piped = open_one.shown.decode(), wordy.run(*words.split()).out
    assert max(map(width, shown.split("\n"))) <= columns
    assert {*shown.split()} >= {*re.sub(r"(?m)^\w+ .*\n", "", piped).split()}
    lines = [line.strip() for line in shown.split("\n")]
    if "rejects" in words and columns < 100:
        assert f"reason: {REASON}"[: columns - 20] in " ".join(lines)


def test_what_is_to_be_typed_is_not_broken() -> None:
    typed = 'to type: batchrun approve 4be1c9a02d publish --why "the shop has asked for it"'
    told = f"It asks for an approval, which only a person can give; {typed}"
    assert batchrun.fold(typed, 40) == typed
    for line in ("to go on: cd shop && batchrun run sync", "to type: kill -CONT 12345"):
        assert batchrun.fold(line, 12) == line
    assert batchrun.fold(told, 80).split("\n") == [
        "It asks for an approval, which only a person can give; to type:",
        typed.removeprefix("to type: "),
    ]


def test_a_broken_line_goes_on_below_its_text() -> None:
    assert batchrun.fold("  why           It is so because of that.", 32).split("\n") == [
        "  why           It is so because",
        "                of that.",
    ]
    assert batchrun.fold("  batches  5, the newest 12 ms ago", 27).split("\n") == [
        "  batches  5, the newest",
        "           12 ms ago",
    ]
    logged = "2026-11-30T08:59:08.342Z WARNING it is a line with one blank before its text"
    assert batchrun.fold(logged, 70).split("\n")[1] == " " * 33 + "its text"
    assert batchrun.fold(logged, 50).split("\n")[1] == "    one blank before its text"
    assert batchrun.fold("世" * 5 + " " + "世" * 5, 12).split("\n") == ["世" * 5] * 2
    assert batchrun.fold("x" * 50, 20) == "x" * 50


@pytest.mark.parametrize("words", ["unit sync", "metrics", "report sync --markdown"])
def test_what_is_pasted_into_a_file_is_as_wide_as_it_is(
    wordy: Project, terminal: Open, words: str
) -> None:
    open_one = terminal(wordy, *words.split(), columns=40)
    assert open_one.ends() == 0
    shown = open_one.shown.decode().replace("\r\n", "\n").split("\n")
    assert [line[:60] for line in shown] == [
        line[:60] for line in wordy.run(*words.split()).out.split("\n")
    ]
