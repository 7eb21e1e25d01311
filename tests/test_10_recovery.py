"""Section 10: what a start finds, in real files; each repair is said, none without need."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import pytest
from conftest import Ended, Project, clean_environment, wait_for

from batchrun import (
    SCHEMA_VERSION,
    Busy,
    Checkpoint,
    CheckpointStore,
    Host,
    JobLock,
    Ledger,
    PersonNeeded,
    ProcessIdentity,
    Repair,
    Start,
    StateDirectory,
    agree,
    apply_repair,
    check,
    checkpoint_bytes,
    find_repair,
    is_owned,
    load_config,
    open_ledger,
    parse_checkpoint,
    require_witnesses_known,
)

CONFIG = """
[defaults]
batch_size = 10

[jobs.sync]
"""
JOB = """
import os

from batchrun import job

LAST = int(os.environ.get("LAST", "50"))


def read(after, limit):
    after = after or 0
    return list(range(after + 1, min(LAST, after + limit) + 1))


@job
def sync(ctx):
    out = ctx.connect("sqlite:out.db")
    if "BOOM" in os.environ:
        raise RuntimeError("before the first batch")
    for batch in ctx.batches(read, key=int, target=out):
        with batch.transaction() as rows:
            rows.execute("CREATE TABLE IF NOT EXISTS out (n INTEGER PRIMARY KEY)")
            rows.executemany("INSERT INTO out VALUES (?)", [(n,) for n in batch])
        yield batch
"""


class Shop:
    """A project with one job of five batches of ten records, applied once or failing loudly."""

    def __init__(self, project: Project) -> None:
        self.project = project
        project.write(CONFIG, sync=JOB)

    def batchrun(self, *words: str, point: str = "", **env: str) -> Ended:
        ended = self.project.finish(self.begin(*words, point=point, **env))
        first, _, rest = ended.err.partition("\n")  # a clone under /tmp is warned about
        return replace(ended, err=rest) if first.startswith("warning: ") else ended

    def begin(self, *words: str, point: str = "", **env: str) -> subprocess.Popen[str]:
        env = {**clean_environment(), **env, "BATCHRUN_TEST_POINT": point}
        return self.project.start("-v", *words, env=env)

    def paused_after(self, batches: int) -> None:
        ended = self.batchrun("run", "sync", "--batches", str(batches))
        assert ended.code == 75, ended.err

    def killed_at(self, point: str) -> None:
        """Run until worker and supervisor are killed at a point."""
        process = self.begin("run", "sync", point=f"{point}=kill-both")
        assert self.project.finish(process).code == -signal.SIGKILL

    def keep_as(self, name: str) -> None:
        shutil.copytree(self.project.folder, self.project.outputs / f"as-{name}")

    def back_to(self, name: str) -> None:
        shutil.rmtree(self.project.folder)
        shutil.copytree(self.project.outputs / f"as-{name}", self.project.folder)

    def opened(self) -> contextlib.closing[Ledger]:
        return contextlib.closing(open_ledger(self.ledger, Host(), create=False, witnesses=True))

    def store(self, job: str = "sync") -> CheckpointStore:
        return CheckpointStore(self.project.state / "checkpoints" / job)

    def admitted(self) -> list[str]:
        """Admit the run as a supervisor does, whose process is gone then; return what it says."""
        store = self.store()
        store.open()
        start = Start(
            owner=ProcessIdentity(1, 1, "an old boot"),
            who="a test",
            run_id="new",
            require_admission=lambda: None,
            require_may_go_on=lambda _: None,
            write_checkpoint=store.replace,
        )
        with self.opened() as ledger:
            require_witnesses_known(ledger, store)
            return ledger.admit("sync", start, lambda r: agree(ledger, store, r, anew=False)).said

    def findings(self) -> list[str]:
        with self.opened() as ledger:
            return [finding.what for finding in check(ledger, self.store, ["sync"])]

    @property
    def ledger(self) -> Path:
        return self.project.state / "ledger.db"

    @property
    def checkpoint(self) -> Path:
        (found,) = self.project.state.glob("checkpoints/sync/*.json")
        return found

    @property
    def number(self) -> int:
        return self.read().number

    def read(self) -> Checkpoint:
        return parse_checkpoint(self.checkpoint.read_bytes())[0]

    def craft(self, **fields: Any) -> None:  # noqa: ANN401 - of a checkpoint
        """Put a valid checkpoint with other fields in place."""
        self.checkpoint.write_bytes(checkpoint_bytes(self.read()._replace(**fields))[0])

    def sql(self, sql: str, *bindings: object) -> list[Any]:
        with contextlib.closing(apsw.Connection(str(self.ledger))) as ledger:
            return list(ledger.execute(sql, bindings))

    def records(self) -> list[int]:
        with contextlib.closing(apsw.Connection(str(self.project.folder / "out.db"))) as out:
            return [n for (n,) in out.execute("SELECT n FROM out ORDER BY n")]

    def goes_on(self, **env: str) -> list[str]:
        """Run to the end, check that every record was applied once; return the repairs said."""
        ended = self.batchrun("run", "sync", **env)
        assert (ended.code, self.records()) == (0, list(range(1, 51))), ended.err
        assert self.findings() == []
        return repairs_in(ended.err)

    def refuses(self, code: int = 13) -> str:
        """Start, check that nothing was changed, and return the letter."""
        before, rows = self.checkpoint.read_bytes(), self.records()
        ended = self.batchrun("run", "sync")
        assert ended.code == code, ended.err
        assert (self.checkpoint.read_bytes(), self.records()) == (before, rows)
        assert "Traceback" not in ended.err
        return ended.err


def repairs_in(text: str) -> list[str]:
    """Return the lines that say that something was repaired."""
    return [line for line in text.splitlines() if re.search("restored|rolled forward", line)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """One project; `paused` (after two batches) and `killed` (in its fifth) are kept beside it."""
    base = tmp_path_factory.mktemp("recovery")
    for name in ("shop", "outputs"):
        (base / name).mkdir(mode=0o700)
    shop = Shop(Project(base / "shop", base / "outputs"))
    shop.keep_as("new")
    shop.paused_after(2)
    assert not log_of(shop.ledger).exists()
    shop.keep_as("paused")
    shop.killed_at("target.commit@5")
    assert log_of(shop.ledger).stat().st_size > 0
    shop.keep_as("killed")
    yield shop
    shop.project.kill_all()


@pytest.fixture
def shop(prepared: Shop) -> Iterator[Shop]:
    """A project in which nothing has run yet."""
    prepared.back_to("new")
    yield prepared
    prepared.project.kill_all()


@pytest.fixture
def paused(shop: Shop) -> Shop:
    """A project whose run stands after two batches, ended cleanly: no log is left."""
    shop.back_to("paused")
    return shop


@pytest.fixture
def killed(shop: Shop) -> Shop:
    """A project whose run was killed after four batches, two of them in the log only."""
    shop.back_to("killed")
    return shop


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def copy_of(shop: Shop, name: str) -> Path:
    """Copy the ledger of stopped or ended processes, as a backup by files would."""
    folder = shop.project.outputs / name
    folder.mkdir()
    for path in shop.project.state.glob("ledger.db*"):
        if not path.name.endswith("-shm"):
            shutil.copy(path, folder)
    return folder


def put_back(shop: Shop, folder: Path) -> None:
    for path in shop.project.state.glob("ledger.db*"):
        path.unlink()
    for path in folder.iterdir():
        shutil.copy(path, shop.project.state)


# --- the table, row by row ------------------------------------------------------------------------


def test_nothing_there_is_a_start(shop: Shop) -> None:
    assert shop.goes_on() == []


def test_what_agrees_goes_on_and_nothing_is_repaired(paused: Shop) -> None:
    before = paused.checkpoint.stat()
    assert paused.admitted() == []
    assert os.path.samestat(before, paused.checkpoint.stat())
    paused.back_to("paused")
    assert paused.goes_on() == []


@pytest.mark.parametrize("point", ["checkpoint.fsync@3", "ledger.commit@3"])
def test_a_checkpoint_one_ahead_rolls_the_ledger_forward(shop: Shop, point: str) -> None:
    shop.killed_at(point)
    before = shop.checkpoint.stat()
    rows = shop.sql("SELECT number FROM run")
    held = shop.checkpoint.open()  # its number is not given to another file meanwhile
    ended = shop.batchrun("run", "sync", BOOM="1")
    assert (rows, shop.number) == ([(2,)], 3)
    assert shop.sql("SELECT number FROM run") == [(3,)]
    assert shop.checkpoint.stat().st_ino != before.st_ino  # written anew: it is on the disk now
    held.close()
    assert repairs_in(ended.err) == [
        "commit 3 was in the checkpoint only: the ledger is rolled forward"
    ]
    assert shop.goes_on() == []


def test_what_agrees_after_a_kill_is_written_anew_and_nothing_is_repaired(killed: Shop) -> None:
    before = killed.checkpoint.stat()
    with killed.checkpoint.open():  # its number is not given to another file meanwhile
        assert repairs_in(killed.batchrun("run", "sync", BOOM="1").err) == []
        assert killed.checkpoint.stat().st_ino != before.st_ino
    assert killed.number == 4
    assert killed.goes_on() == []


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def become_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "it is missing"),
    "empty": (
        lambda path: path.write_bytes(b""),
        "it does not begin with a header of batchrun-checkpoint",
    ),
    "400 NULs": (
        lambda path: path.write_bytes(bytes(400)),
        "it does not begin with a header of batchrun-checkpoint",
    ),
    "cut": (cut, "it is torn or changed"),
    "flipped": (flip, "it is torn or changed"),
    "a link": (become_link, "it is a link or a socket, not a file"),
    "a pipe": (become_pipe, "it is a directory or a pipe, not a file"),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_checkpoint_that_is_missing_or_broken_is_restored_from_the_ledger(
    paused: Shop, how: str
) -> None:
    path, content = paused.checkpoint, paused.checkpoint.read_bytes()
    break_it, state = BREAKS[how]
    break_it(path)
    (said,) = paused.admitted()
    at = "restored from the ledger's copy of commit 2"
    assert said.startswith(f"the checkpoint {path} was {at}: {state}")
    assert path.read_bytes() == content
    assert not path.is_symlink()
    assert paused.admitted() == [f"run {path.stem} was left by its owner: interrupted"]


def test_a_restored_checkpoint_is_said_and_gone_on_at(paused: Shop) -> None:
    cut(paused.checkpoint)
    (said,) = paused.goes_on()
    assert said.startswith(f"the checkpoint {paused.checkpoint} was restored from ")


def test_a_broken_checkpoint_without_a_sound_copy_is_refused(paused: Shop) -> None:
    shop = paused
    run, path = shop.read().run, shop.checkpoint
    shop.sql("UPDATE run SET checkpoint = substr(checkpoint, 1, 200)")
    path.write_bytes(b"")
    assert shop.refuses() == (
        f"Run {run} of sync cannot go on: the checkpoint is missing or broken, and the ledger has"
        " no valid copy of it.\n"
        f"Found {path}: it does not begin with a header of batchrun-checkpoint; in the ledger:"
        " commit 2 of generation 1. Known to be lost: where it stood.\n"
        "Nothing was changed.\n"
        "Put the right files back from a backup, or begin anew: batchrun run sync --fresh\n"
    )
    assert shop.batchrun("repair").out == "nothing to repair\n"
    checked = shop.batchrun("--json", "check").document["findings"]
    assert [found["todo"] for found in checked] == [
        "Put the right files back from a backup, or begin anew: batchrun run sync --fresh"
    ]
    (shop.project.folder / "out.db").unlink()
    assert shop.batchrun("run", "sync", "--fresh").code == 0


@pytest.mark.parametrize(
    ("damage", "what", "next_step"),
    [
        (
            "UPDATE run SET checkpoint = substr(checkpoint, 1, 200)",
            "the ledger's copy of its checkpoint is not valid",
            "its next commit makes it anew",
        ),
        (
            "UPDATE batch SET hash = 'aa' WHERE number = 2",
            "the row of its newest commit has another hash than the run",
            "only an older checkpoint, if one is put back, would be judged by it",
        ),
    ],
    ids=["copy", "newest row"],
)
def test_what_is_wrong_in_the_ledger_beside_a_good_checkpoint_is_found_and_outlived(
    paused: Shop, damage: str, what: str, next_step: str
) -> None:
    shop, run = paused, paused.read().run
    shop.sql(damage)
    assert f"to type: batchrun resume {run}\n" in shop.batchrun("status", "sync").out
    checked = shop.batchrun("check")
    found = f"run {run} of sync: {what}\n  {next_step}\n  to type: batchrun resume {run}\n"
    assert (checked.code, checked.out) == (3, found)
    assert shop.batchrun("resume", run).code == 0
    assert shop.findings() == []


def test_an_older_checkpoint_of_the_same_chain_is_restored_from_the_ledger(shop: Shop) -> None:
    shop.back_to("paused")
    old = shop.checkpoint.read_bytes()
    shop.paused_after(1)
    shop.checkpoint.write_bytes(old)
    assert shop.goes_on() == [
        (
            f"the checkpoint {shop.checkpoint} was restored from the ledger's copy of commit 3:"
            " it is older than the ledger"
        )
    ]


REFUSED: dict[str, tuple[Callable[[Checkpoint], dict[str, Any]], str]] = {
    "older, of another chain": (
        lambda c: {"number": c.number - 1, "cursor": "7"},
        "the checkpoint does not fit the ledger's chain of commits",
    ),
    "as new, of another chain": (
        lambda _: {"cursor": "7"},
        "the checkpoint does not fit the ledger's chain of commits",
    ),
    "one ahead, of another chain": (
        lambda c: {"number": c.number + 1},
        "the checkpoint does not fit the ledger's chain of commits",
    ),
    "two ahead": (
        lambda c: {"number": c.number + 2},
        "the checkpoint does not fit the ledger's chain of commits",
    ),
    "a newer generation": (
        lambda c: {"generation": c.generation + 1},
        "the checkpoint's generation is newer than the ledger's",
    ),
    "a later event": (
        lambda c: {"event": c.event + 1000},
        "the ledger is behind the events that the checkpoint names",
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_checkpoint_that_contradicts_the_ledger_is_refused(paused: Shop, how: str) -> None:
    run = paused.read().run
    fields, why = REFUSED[how]
    paused.craft(**fields(paused.read()))
    before, rows = paused.checkpoint.read_bytes(), paused.sql("SELECT * FROM run")
    with pytest.raises(PersonNeeded) as refusal:
        paused.admitted()
    letter = str(refusal.value)
    assert letter.startswith(f"Run {run} of sync cannot go on: {why}.\nFound {paused.checkpoint}: ")
    way = "Put the right files back from a backup, or see: batchrun repair"
    assert letter.endswith(f"Nothing was changed.\n{way}")
    assert paused.batchrun("repair").code == 3
    assert paused.findings() == [f"run {run} of sync: {why}"]
    assert (paused.checkpoint.read_bytes(), paused.sql("SELECT * FROM run")) == (before, rows)


FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "another ledger": ({"ledger": "0" * 32}, "it is of another ledger"),
    "another job": ({"job": "other", "number": 6}, "it is of run {run} of other"),
    "another run": ({"run": "0000000000", "number": 6}, "it is of run 0000000000 of sync"),
}


@pytest.mark.parametrize("how", FOREIGN)
def test_the_file_of_another_run_is_replaced_by_the_ledgers_copy(paused: Shop, how: str) -> None:
    shop, path, content = paused, paused.checkpoint, paused.checkpoint.read_bytes()
    fields, why = FOREIGN[how]
    shop.craft(**fields)
    why = why.format(run=path.stem)
    checked = shop.batchrun("check")
    assert (
        checked.code,
        f"\n  {why}\n  to type: batchrun resume {path.stem}\n" in checked.out,
    ) == (
        3,
        True,
    )
    assert shop.batchrun("repair").out == "nothing to repair\n"
    (said,) = shop.admitted()
    assert said.startswith(f"the checkpoint {path} was restored from the ledger's copy of commit 2")
    assert said.endswith(f": {why}")
    assert path.read_bytes() == content
    assert shop.goes_on() == []


def test_the_file_of_another_job_is_no_witness_against_the_ledger(paused: Shop) -> None:
    shop, run = paused, paused.read().run
    shop.craft(job="other", run="0000000000", number=6)
    shop.sql("UPDATE run SET checkpoint = NULL")
    letter = shop.refuses()
    assert f"Found {shop.checkpoint}: it is of run 0000000000 of other; in the ledger: " in letter
    assert "Known to be lost: where it stood.\n" in letter
    assert letter.endswith(", or begin anew: batchrun run sync --fresh\n")
    assert shop.batchrun("repair").out == "nothing to repair\n"
    (shop.project.folder / "out.db").unlink()
    assert shop.batchrun("run", "sync", "--fresh", "--batches", "2").code == 75
    assert f"to type: batchrun resume {run}" not in shop.batchrun("status", "sync").out
    assert shop.batchrun("check").out == "ledger and checkpoints agree\n"
    assert shop.batchrun("resume", "--all").code == 0
    assert (shop.records(), shop.findings()) == (list(range(1, 51)), [])


@pytest.mark.parametrize("how", ["cancel", "fresh"])
def test_a_run_killed_within_its_commit_can_be_cancelled_or_begun_anew(
    shop: Shop, how: str
) -> None:
    shop.killed_at("checkpoint.fsync@3")
    if how == "cancel":
        assert shop.batchrun("cancel", shop.read().run).code == 0
        assert shop.batchrun("check").out == "ledger and checkpoints agree\n"
        (shop.project.folder / "out.db").unlink()
    else:
        (shop.project.folder / "out.db").unlink()
        assert shop.batchrun("run", "sync", "--fresh", "--batches", "2").code == 75
        assert shop.batchrun("check").out == "ledger and checkpoints agree\n"
    assert shop.goes_on() == []


def test_a_checkpoint_ahead_is_refused_and_says_what_is_lost(paused: Shop) -> None:
    paused.craft(number=6)
    assert "Known to be lost: the rows of commits 3 to 5." in paused.refuses()
    assert paused.batchrun("check").code == 3


def empty(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("no database\n" * 1000)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def flip_pages(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for page in range(1, len(content) // 4096):
        content[page * 4096 : page * 4096 + 16] = bytes(16)
    path.write_bytes(content)


@pytest.mark.parametrize("lose", [Path.unlink, empty, text, cut_short])
def test_a_lost_ledger_is_refused_untouched(paused: Shop, lose: Callable[[Path], object]) -> None:
    lose(paused.ledger)
    before = paused.ledger.read_bytes() if paused.ledger.exists() else None
    with pytest.raises(PersonNeeded) as refusal:
        paused.admitted()
    assert refusal.value.todo.endswith("`batchrun repair`.")
    assert (paused.ledger.read_bytes() if paused.ledger.exists() else None) == before


@pytest.mark.parametrize("lose", [Path.unlink, flip_pages])
def test_a_lost_ledger_is_repaired_only_on_demand(
    shop: Shop, lose: Callable[[Path], object]
) -> None:
    assert shop.batchrun("run", "sync").code == 0  # an older run: its checkpoint is there too
    (shop.project.folder / "out.db").unlink()
    shop.batchrun("run", "sync", "--batches", "2")
    newest = max(shop.project.state.glob("checkpoints/sync/*"), key=lambda p: p.stat().st_mtime_ns)
    lose(shop.ledger)
    found = shop.ledger.read_bytes() if shop.ledger.exists() else None
    stored = newest.read_bytes()
    ended = shop.batchrun("run", "sync", "--fresh")
    assert ended.code == 13, ended.err
    assert "batchrun repair" in ended.err.splitlines()[-1]
    shown = shop.batchrun("repair")
    assert (shown.code, f"run {newest.stem} of sync: the ledger is lost" in shown.out) == (3, True)
    assert (shop.ledger.read_bytes() if shop.ledger.exists() else None) == found
    assert newest.read_bytes() == stored
    applied = shop.batchrun("repair", "--apply")
    assert applied.code == 0, applied.err
    aside = next((shop.project.state / "aside").iterdir())
    assert (aside / newest.name).read_bytes() == stored
    assert found is None or (aside / "ledger.db").read_bytes() == found
    ended = shop.batchrun("run", "sync")
    assert f"run {newest.stem} goes on after commit 2, 20 records read" in ended.err
    assert (ended.code, shop.records()) == (0, list(range(1, 51)))
    assert shop.findings() == []


def test_a_repair_that_meets_a_busy_job_keeps_no_lock_of_another(paused: Shop) -> None:
    state = StateDirectory(load_config(paused.project.folder / "batchrun.toml"), Host())
    (paused.project.state / "checkpoints" / "then").mkdir()
    busy = JobLock(state.lock_path("then"))
    assert busy.acquire()
    with pytest.raises(Busy) as refusal:
        apply_repair(state, Repair("it is lost", []), Host())
    busy.release()
    assert refusal.value.what == "A job that is to be repaired runs right now."
    assert not is_owned(state, "sync")


def test_a_repair_of_what_has_moved_since_the_look_changes_nothing(paused: Shop) -> None:
    state = StateDirectory(load_config(paused.project.folder / "batchrun.toml"), Host())
    paused.craft(number=6)
    seen = find_repair(state)
    paused.craft(number=7)
    stands = paused.checkpoint.read_bytes()
    with pytest.raises(Busy) as refusal:
        apply_repair(state, seen, Host())
    assert refusal.value.what == "Something ran since the look at what is to be repaired."
    assert paused.checkpoint.read_bytes() == stands
    assert not (state.path / "aside").exists()


def test_a_ledger_from_three_batches_ago_is_refused_and_repaired_only_on_demand(shop: Shop) -> None:
    put_back_after(shop, stop_at=1, batches=4)
    letter = shop.refuses()
    assert "the checkpoint does not fit the ledger's chain of commits" in letter
    assert "Known to be lost: the rows of commits 2 to 3." in letter
    assert shop.batchrun("repair").code == 3
    assert shop.batchrun("repair", "--apply").code == 0
    ended = shop.batchrun("run", "sync")
    assert (ended.code, shop.records()) == (0, list(range(1, 51))), ended.err
    checked = shop.batchrun("check")
    assert checked.code == 0
    first, note = checked.out.splitlines()
    assert first == "ledger and checkpoints agree"
    run = shop.batchrun("--json", "status").document["jobs"][0]["run"]
    told = f"note: run {run} of sync: commits 2 to 3 have no rows, since a repair at "
    assert note.startswith(told)
    shop.sql("DELETE FROM batch WHERE number = 5")
    lost = shop.batchrun("check")
    assert (lost.code, "commit 5 has no row\n" in lost.out) == (3, True)


def put_back_after(shop: Shop, *, stop_at: int, batches: int) -> None:
    """Copy the ledger after one commit of an attempt, end the attempt later, put the copy back."""
    point = f"ledger.committed@{stop_at}=stop"
    process = shop.begin("run", "sync", "--batches", str(batches), point=point)
    worker = stopped_worker(shop)
    copy = copy_of(shop, f"backup-{stop_at}")
    os.kill(worker, signal.SIGCONT)
    assert shop.project.finish(process).code == 75
    put_back(shop, copy)


def stopped_worker(shop: Shop) -> int:
    """Wait for the process that stopped itself at a named point."""
    host = Host()

    def stopped() -> int | None:
        found = (host.identify(pid) for pid in shop.project.living())
        return next((p.pid for p in found if p and host.is_stopped(p)), None)

    return wait_for(stopped, "a process to stop at its point") or 0


def test_a_ledger_from_one_batch_ago_is_rolled_forward(shop: Shop) -> None:
    put_back_after(shop, stop_at=3, batches=4)
    assert shop.goes_on() == ["commit 4 was in the checkpoint only: the ledger is rolled forward"]


def test_a_ledger_from_a_generation_ago_is_refused(paused: Shop) -> None:
    shop, copy = paused, copy_of(paused, "generation")
    shop.paused_after(1)
    put_back(shop, copy)
    assert "the checkpoint's generation is newer than the ledger's" in shop.refuses()


def test_a_ledger_that_does_not_know_a_checkpoint_is_refused(shop: Shop) -> None:
    assert shop.batchrun("run", "sync").code == 0
    copy = copy_of(shop, "before the run")
    (shop.project.folder / "out.db").unlink()
    assert shop.batchrun("run", "sync", "--batches", "1").code == 75
    put_back(shop, copy)
    ended = shop.batchrun("run", "sync")
    assert ended.code == 13
    assert ": it does not know the run of " in ended.err
    assert shop.batchrun("check").code == 13
    assert shop.batchrun("repair", "--apply").code == 0
    assert shop.batchrun("run", "sync").code == 0
    assert shop.records() == list(range(1, 51))


def test_a_newer_format_is_refused_untouched(paused: Shop) -> None:
    shop = paused
    content = shop.checkpoint.read_bytes().replace(
        b"batchrun-checkpoint 1", b"batchrun-checkpoint 2"
    )
    shop.checkpoint.write_bytes(content)
    assert "A file of batchrun-checkpoint has format 2; this batchrun knows 1." in shop.refuses(5)
    now = SCHEMA_VERSION
    shop.sql(f"PRAGMA user_version = {now + 1}")
    assert f"has version {now + 1}; this batchrun knows {now}." in shop.refuses(5)


def test_a_ledger_without_a_version_is_told_alike_and_made_anew_once_moved_away(
    paused: Shop,
) -> None:
    shop, way = paused, "Put the ledger back from a backup; if there is none, move it away"
    shop.sql("PRAGMA user_version = 0")
    for command in ("check", "repair", "status"):
        ended = shop.batchrun(command)
        assert (ended.code, way in ended.err) == (5, True), ended.err
    assert way in shop.refuses(5)
    shop.ledger.rename(shop.project.outputs / "moved.db")
    assert shop.batchrun("repair", "--apply").code == 0
    assert shop.goes_on() == []


def test_a_full_disk_is_no_corruption_and_goes_on_when_there_is_room(shop: Shop) -> None:
    shop.back_to("paused")
    ended = shop.batchrun("run", "sync", point="file.fsync=ENOSPC")
    assert (ended.code, shop.number) == (5, 2)
    (log,) = shop.project.state.glob("logs/sync/*")
    assert " ERROR Disk full: a checkpoint cannot be written" in log.read_text().splitlines()[0]
    assert shop.goes_on() == ["commit 3 is in the target already: rolled forward"]
    shop.project.write('min_free = "900TB"\n' + CONFIG, sync=JOB)
    full = shop.batchrun("run", "sync")
    assert (full.code, full.err.startswith("Disk full: ")) == (5, True)


def test_a_run_whose_processes_are_gone_is_told_of_with_the_last_words_of_its_log(
    shop: Shop,
) -> None:
    shop.killed_at("ledger.commit@2")
    gone = "Its processes are gone"
    silent = f"{gone} without a word: killed, or the machine was switched off.\n"
    run = shop.batchrun("--json", "status").document["jobs"][0]["run"]
    assert f"{silent}What it did last: batchrun logs {run}" in why(shop)
    (log,) = shop.project.state.glob("logs/sync/*")
    at = "2026-01-31T23:59:59.000Z"
    with log.open("a") as file:
        file.write(f"{at} ERROR Disk full: no room.\n{at} ERROR The last commit stands.\n")
    assert f"{gone}; its log ends with: Disk full: no room." in why(shop)
    with log.open("a") as file:
        lines = ("Traceback (most recent call last):", "  File", "OSError: it is lost")
        file.writelines(f"{at[:-2]}1Z ERROR {line}\n" for line in lines)
    assert f"{gone}; its log ends with: OSError: it is lost" in why(shop)
    with log.open("a") as file:
        file.write(f"{at} INFO it goes on\n")
    assert silent in why(shop)


def test_a_run_whose_processes_are_gone_is_interrupted_in_every_text(shop: Shop) -> None:
    shop.killed_at("ledger.commit@2")
    (job,) = shop.batchrun("--json", "status", "sync").document["jobs"]
    assert (job["state"], job["records_per_s"], job["left_s"]) == ("interrupted", 0, None)
    (listed,) = shop.batchrun("--json", "jobs").document["jobs"]
    assert listed["last_run"]["state"] == "interrupted"
    assert shop.batchrun("--json", "report", "sync").document["state"] == "interrupted"
    (row,) = shop.batchrun("--json", "report", "--since", "1h").document["runs"]
    assert row["state"] == "interrupted"
    assert "running" not in shop.batchrun("report", "sync").out.splitlines()[0]


def why(shop: Shop) -> str:
    return str(shop.batchrun("--json", "status", "sync").document["jobs"][0]["why"])


def test_below_min_free_only_a_start_is_refused(shop: Shop) -> None:
    shop.back_to("paused")
    shop.project.write('min_free = "900TB"\n' + CONFIG, sync=JOB)
    for words in (["run", "sync"], ["resume", "sync"], ["run", "sync", "--fresh"]):
        assert shop.batchrun(*words).err.startswith("Disk full: less than 900,000,000,000,000")
    for words in (
        ["maintenance", "on"],
        ["drain"],
        ["maintenance", "off"],
        ["pause", "sync"],
        ["prune"],
        ["repair"],
        ["cancel", "sync"],
    ):
        done = shop.batchrun(*words)
        assert (done.code, "Disk full" in done.err) == (0, False), done


# --- the log --------------------------------------------------------------------------------------


def test_a_log_that_was_deleted_is_noticed_by_the_checkpoint(killed: Shop) -> None:
    log_of(killed.ledger).unlink()
    assert "the checkpoint's generation is newer than the ledger's" in killed.refuses()


@pytest.mark.parametrize("part", range(1, 20, 2))
@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_a_broken_log_is_noticed_by_the_checkpoint_or_held_nothing_more(
    killed: Shop, how: str, part: int
) -> None:
    log = log_of(killed.ledger)
    content = bytearray(log.read_bytes())
    place = len(content) * part // 20
    if how == "cut":
        del content[place:]
    else:
        content[place : place + 100] = bytes(b ^ 0x55 for b in content[place : place + 100])
    log.write_bytes(content)
    killed.ledger.with_name("ledger.db-shm").unlink()
    before = killed.checkpoint.read_bytes()
    try:
        killed.admitted()
    except PersonNeeded:
        assert killed.checkpoint.read_bytes() == before
    else:
        assert killed.sql("SELECT number FROM run") == [(4,)]


def test_a_run_whose_log_was_broken_is_repaired_and_applies_each_record_once(killed: Shop) -> None:
    log_of(killed.ledger).write_bytes(b"garbage in its header" * 400)
    assert killed.batchrun("run", "sync").code == 13
    assert killed.batchrun("repair", "--apply").code == 0
    assert killed.batchrun("run", "sync").code == 0
    assert killed.records() == list(range(1, 51))


@pytest.mark.parametrize("how", ["garbage", "deleted"])
def test_the_index_of_the_log_is_made_anew(killed: Shop, how: str) -> None:
    index = killed.ledger.with_name("ledger.db-shm")
    if how == "garbage":
        index.write_bytes(os.urandom(index.stat().st_size))
    else:
        index.unlink()
    assert killed.goes_on() == []


def test_a_stale_log_beside_a_ledger_is_noticed_by_the_checkpoint(killed: Shop) -> None:
    stale = log_of(killed.ledger).read_bytes()
    killed.paused_after(1)
    log_of(killed.ledger).write_bytes(stale)
    with pytest.raises(PersonNeeded):
        killed.admitted()


# --- cases ----------------------------------------------------------------------------------------


def test_a_job_that_fails_before_its_first_batch_leaves_the_checkpoint_as_it_is(shop: Shop) -> None:
    shop.back_to("paused")
    content = shop.checkpoint.read_bytes()
    for _ in range(2):
        assert shop.batchrun("run", "sync", BOOM="1").code == 1
        assert shop.checkpoint.read_bytes() == content
    ended = shop.batchrun("run", "sync")
    assert "goes on after commit 2, 20 records read" in ended.err
    assert shop.records() == list(range(1, 51))


def test_a_run_without_records_ends_well_and_the_last_checkpoint_stays(shop: Shop) -> None:
    assert shop.batchrun("run", "sync").code == 0
    path, content = shop.checkpoint, shop.checkpoint.read_bytes()
    assert shop.batchrun("run", "sync", LAST="0").code == 0
    assert path.read_bytes() == content


RECOVERY_POINTS = [
    "admit.judged",
    "file.fsync",
    "checkpoint.rename",
    "checkpoint.fsync",
    "admit.commit",
    "admit.committed",
]


@pytest.mark.parametrize("point", RECOVERY_POINTS)
def test_a_recovery_that_is_killed_is_done_again(shop: Shop, point: str) -> None:
    shop.killed_at("checkpoint.fsync@3")
    assert shop.batchrun("run", "sync", point=f"{point}=kill").code == -signal.SIGKILL
    status = shop.batchrun("status", "sync")
    assert "interrupted" in status.out
    rolled = shop.goes_on()
    assert rolled == (
        []
        if point == "admit.committed"
        else ["commit 3 was in the checkpoint only: the ledger is rolled forward"]
    )


@pytest.mark.parametrize("field", ["boot_id", "ticks"])
def test_an_owner_of_another_boot_or_with_a_reused_pid_is_gone(shop: Shop, field: str) -> None:
    shop.back_to("killed")
    me = Host().identify()
    assert me is not None
    other = {**me._asdict(), field: "another boot" if field == "boot_id" else me.ticks - 1}
    shop.sql("UPDATE attempt SET supervisor = ?1, worker = ?1", json.dumps(other))
    status = shop.batchrun("status", "sync")
    assert "interrupted" in status.out
    assert shop.goes_on() == []


def test_an_owner_whose_lock_file_is_gone_stops_before_it_commits(shop: Shop) -> None:
    process = shop.begin("run", "sync", point="commit.prepared@3=stop")
    worker = stopped_worker(shop)
    (shop.project.state / "locks" / "sync.lock").unlink()
    os.kill(worker, signal.SIGCONT)
    ended = shop.project.finish(process)
    assert (ended.code, shop.number) == (14, 2), ended.err
    assert shop.goes_on() == ["commit 3 is in the target already: rolled forward"]


def test_an_owner_of_an_older_generation_changes_nothing(shop: Shop) -> None:
    process = shop.begin("run", "sync", point="commit.prepared@3=stop")
    worker = stopped_worker(shop)
    shop.sql("UPDATE run SET generation = generation + 1")
    rows = shop.sql("SELECT * FROM batch")
    os.kill(worker, signal.SIGCONT)
    ended = shop.project.finish(process)
    assert (ended.code, shop.number, shop.sql("SELECT * FROM batch")) == (14, 2, rows), ended.err
    assert [path.name for path in shop.checkpoint.parent.iterdir()] == [shop.checkpoint.name]


def test_a_checkpoint_that_vanishes_under_a_worker_is_not_record_1_again(shop: Shop) -> None:
    shop.back_to("paused")
    process = shop.begin("run", "sync", point="admit.committed=stop")
    supervisor = stopped_worker(shop)
    shop.checkpoint.unlink()
    os.kill(supervisor, signal.SIGCONT)
    assert shop.project.finish(process).code == 13
    at = "restored from the ledger's copy of commit 2"
    assert shop.goes_on() == [f"the checkpoint {shop.checkpoint} was {at}: it is missing"]


def test_a_pause_that_was_asked_for_outlives_its_owner(shop: Shop) -> None:
    process = shop.begin("run", "sync", point="batch.yielded@3=stop")
    stopped_worker(shop)
    assert shop.batchrun("pause", "sync").code == 0
    for pid in shop.project.living():
        os.kill(pid, signal.SIGKILL)
    shop.project.finish(process)
    assert shop.batchrun("resume", "--all").code == 0
    refused = shop.batchrun("run", "sync")
    assert (refused.code, "was paused by a person" in refused.err) == (13, True)
    assert shop.batchrun("resume", "sync").code == 0
    assert shop.records() == list(range(1, 51))


def test_a_reader_held_open_does_not_stop_a_run(paused: Shop) -> None:
    shop = paused
    with contextlib.closing(apsw.Connection(str(shop.ledger))) as reader:
        reader.execute("BEGIN; SELECT * FROM run")
        assert shop.batchrun("run", "sync").code == 0
    assert shop.records() == list(range(1, 51))


def test_checkpoints_of_finished_runs_are_not_kept_for_ever(shop: Shop) -> None:
    for _ in range(3):
        (shop.project.folder / "out.db").unlink(missing_ok=True)
        assert shop.batchrun("run", "sync").code == 0
    assert len(list(shop.project.state.glob("checkpoints/sync/*"))) == 2
    assert shop.batchrun("check").code == 0


# --- check ----------------------------------------------------------------------------------------


def test_check_finds_a_gap(shop: Shop) -> None:
    shop.back_to("killed")
    run = shop.read().run
    shop.sql("DELETE FROM batch WHERE number IN (2, 3)")
    checked = shop.batchrun("check")
    assert (checked.code, checked.out) == (
        3,
        (
            f"run {run} of sync: commits 2 to 3 have no rows\n"
            "  they were lost\n"
            f"  to type: batchrun report {run}\n"
        ),
    )


def test_check_finds_a_target_that_was_put_back(shop: Shop) -> None:
    out = shop.project.folder / "out.db"
    shop.back_to("paused")
    shutil.copy(out, shop.project.outputs / "out.db")
    shop.paused_after(1)
    assert shop.findings() == []
    shutil.copy(shop.project.outputs / "out.db", out)
    checked = shop.batchrun("check")
    run = shop.read().run
    assert (checked.code, checked.out) == (
        3,
        (
            f"run {run} of sync: the target {out} is not where the checkpoint is\n"
            "  loop 'main' has the mark 2 there, and 3 in the checkpoint\n"
            "  to type: put back the target that belongs to the run\n"
        ),
    )
    out.unlink()
    assert "loop 'main' has no mark there" in shop.batchrun("check").out
    assert not out.exists()
    assert shop.batchrun("run", "sync").code == 13


def test_a_target_one_ahead_is_no_finding(shop: Shop) -> None:
    shop.killed_at("target.committed@3")
    assert shop.findings() == []
    assert shop.goes_on() == ["commit 3 is in the target already: rolled forward"]


def test_a_run_of_a_job_that_is_configured_no_more_is_named(shop: Shop) -> None:
    shop.back_to("paused")
    run = shop.read().run
    shop.project.write(CONFIG.replace("jobs.sync", "jobs.other"), sync=JOB, other=JOB)
    checked = shop.batchrun("check")
    assert checked.code == 3
    assert checked.out == (
        f"run {run} of sync is unfinished, and the job is configured no more\n"
        "  nothing goes on with it\n"
        f"  to type: batchrun cancel {run}\n"
    )
    assert shop.batchrun("resume", "--all").code == 0
    assert shop.batchrun("cancel", run).code == 0


@pytest.mark.needs_root
def test_root_reads_another_owners_state_and_makes_no_file(shop: Shop) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT ROOT: cannot give the state to another user")
    shop.back_to("killed")
    everything = [shop.project.state, *shop.project.state.rglob("*")]
    for path in everything:
        os.chown(path, 12345, 12345)
    before = {path: path.stat().st_mtime_ns for path in everything}
    for words in (("status",), ("report", "sync"), ("check",)):
        ended = shop.batchrun(*words)
        assert ended.code in (0, 3), ended.err
    after = [shop.project.state, *shop.project.state.rglob("*")]
    assert {path: path.stat().st_mtime_ns for path in after} == before
    refused = shop.batchrun("run", "sync")
    assert refused.code == 5
    assert "sudo -u 12345 batchrun" in refused.err


@pytest.mark.parametrize("job", ["sync", "other"])
def test_a_file_that_names_another_run_than_its_own_is_moved_aside_by_a_repair(
    paused: Shop, job: str
) -> None:
    shop, own, stray = paused, paused.checkpoint, paused.store(job).path("0123456789")
    stray.parent.mkdir(exist_ok=True)
    shutil.copy(own, stray)
    assert shop.batchrun("check").code == 13
    told = f"{stray}: it is of run {own.stem} of sync; move it aside\n"
    shown = shop.batchrun("repair")
    assert (shown.code, shown.out) == (3, f"{told}to do it: batchrun repair --apply\n")
    content = stray.read_bytes()
    done = shop.batchrun("--json", "repair", "--apply")
    (aside,) = done.document["aside"]
    assert (done.code, stray.exists(), Path(aside).read_bytes()) == (0, False, content)
    assert shop.batchrun("repair").out == "nothing to repair\n"
    assert shop.batchrun("check").code == 0
    assert shop.goes_on() == []
