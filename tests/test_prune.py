"""`prune`: what is old goes whole, and nothing that a resume, a repair or a person may need."""

import contextlib
import json
from collections.abc import Iterator
from typing import NamedTuple

import apsw
import pytest
from conftest import Ended, Project
from test_05_ledger import commit, opened
from test_11_worker import at, records, rows, write_job

from batchrun import (
    ROWS_OF_A_RUN,
    Config,
    Host,
    Ledger,
    PersonNeeded,
    Pruned,
    Run,
    StateDirectory,
    load_config,
    prune,
)

OLD, NEW = "2020-01-01T00:00:00.000Z", "2999-01-01T00:00:00.000Z"
CHILDREN = ("attempt", "batch", "reject", "event", "reading", "health_check", "cleanup", "approval")


class Place(NamedTuple):
    """A state directory with a ledger that is open."""

    config: Config
    state: StateDirectory
    ledger: Ledger

    def run(self, name: str, job: str = "sync", state: str = "succeeded", ended: str = OLD) -> Run:
        """Make a run of two commits, with its files, that ended so and then."""
        run = opened(self.ledger, job=job, run_id=name)
        commit(self.ledger, commit(self.ledger, run))
        ended_at = ended if state in ("succeeded", "cancelled") else None
        sql = "UPDATE run SET state = ?, ended_at = ? WHERE key = ?"
        self.ledger._sql(sql, (state, ended_at, run.key))
        for kind, file in (("checkpoints", "json"), ("logs", "log"), ("images", "1.jsonl")):
            path = self.state.path / kind / job / f"{name}.{file}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x" * 100)
        return self.ledger.run(run.key)

    def prune(self, keep_s: float = 86_400.0, most: int | None = None) -> Pruned:
        """Prune, and return what went."""
        return prune(self.state, self.ledger, keep_s, Host(), "a test", most=most)

    def left(self) -> list[str]:
        """Return the runs that are left."""
        return [row[0] for row in self.ledger._rows("SELECT id FROM run ORDER BY key")]


@pytest.fixture
def place(project: Project) -> Iterator[Place]:
    project.write("[jobs.sync]\n[jobs.other]\n")
    config = load_config(project.folder / "batchrun.toml")
    state = StateDirectory(config, Host())
    state.require_fit(create=True)
    with contextlib.closing(state.open_ledger(create=True)) as ledger:
        yield Place(config, state, ledger)


# --- what goes ------------------------------------------------------------------------------------


def test_an_old_run_goes_with_all_its_rows_and_files(place: Place) -> None:
    gone = place.run("gone")
    place.run("stays")
    pruned = place.prune()
    assert [run.id for run in pruned.runs] == ["gone"]
    assert pruned.files_bytes == 300
    assert place.left() == ["stays"]
    for table in CHILDREN:
        assert place.ledger._rows(f"SELECT 1 FROM {table} WHERE run = ?", gone.key) == []
    files = [path.name for path in place.state.path.glob("*/sync/*")]
    assert {name.split(".")[0] for name in files} == {"stays"}
    assert place.ledger.damage() == ""
    assert place.ledger._rows("PRAGMA foreign_key_check") == []
    said = place.ledger.events(what="pruned")
    assert [event.why for event in said] == [f"1 run that ended before {pruned.before}"]
    assert place.prune().runs == []


def test_nothing_goes_while_everything_is_kept_for_ever(place: Place) -> None:
    place.run("old")
    place.run("newer")
    assert place.prune(keep_s=0)[1:] == ([], 0, 0)
    assert place.left() == ["old", "newer"]


@pytest.mark.parametrize("days", [5e5, 1e9])
def test_what_is_kept_for_a_thousand_years_stays(place: Place, days: float) -> None:
    place.run("old")
    place.run("newest")
    assert place.prune(days * 86_400)[:2] == ("1970-01-01T00:00:00.000Z", [])
    assert place.left() == ["old", "newest"]


def test_a_few_at_a_time_the_newest_first(place: Place) -> None:
    for number in range(5):
        place.run(f"r{number}")
    assert [run.id for run in place.prune(most=2).runs] == ["r3", "r2"]
    assert place.left() == ["r0", "r1", "r4"]


def test_a_hundred_thousand_commits_go_in_small_transactions(place: Place) -> None:
    run = place.run("huge")
    place.run("newest")
    columns = [row[1] for row in place.ledger._rows("PRAGMA table_info(batch)")]
    copied = ", ".join("n" if name == "number" else name for name in columns)
    place.ledger._sql(
        "WITH RECURSIVE c (n) AS (SELECT 3 UNION ALL SELECT n + 1 FROM c WHERE n < 100000)"
        f" INSERT INTO batch SELECT {copied} FROM batch, c WHERE run = ? AND number = 2",
        (run.key,),
    )
    place.ledger.empty_log()
    before, sizes, is_gone = place.ledger._host.later(-1), list[int](), False
    while not is_gone:
        is_gone, _ = place.ledger.prune(run, before)
        sizes.append(place.ledger.log_bytes())
    place.ledger.forget(run)
    assert len(sizes) == 20
    assert max(sizes) < 20_000_000
    assert place.left() == ["newest"]


def test_old_readings_of_a_run_that_goes_on_go_and_it_stays(place: Place) -> None:
    run = place.run("on", state="paused")
    for moment in (OLD, NEW):
        sql = "INSERT INTO reading (at, run, generation, number) VALUES (?, ?, 1, 1)"
        place.ledger._sql(sql, (moment, run.key))
    place.prune()
    assert place.ledger._rows("SELECT at FROM reading") == [(NEW,)]
    assert place.left() == ["on"]


# --- what stays -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["paused", "failed", "interrupted", "awaiting", "running"])
def test_an_unfinished_run_stays_however_old(place: Place, state: str) -> None:
    place.run("one", state=state)
    assert place.prune().runs == []


def test_the_newest_success_of_each_job_stays_and_so_does_its_newest_run(place: Place) -> None:
    for job in ("sync", "other", "forgotten"):
        for name, state in (("a", "succeeded"), ("b", "succeeded"), ("c", "cancelled")):
            place.run(f"{job}-{name}", job, state)
        place.run(f"{job}-d", job, "cancelled")
    place.prune()
    assert place.left() == [
        f"{job}-{name}" for job in ("sync", "other", "forgotten") for name in ("b", "d")
    ]


def make_reject(place: Place, run: Run, state: str, retry: Run | None = None) -> None:
    sql = (
        "INSERT INTO reject (run, number, generation, place, loop, record, reason, at, confirmed,"
        " state, retry) VALUES (?, 1, 1, 0, 'main', '{}', 'bad', '', 1, ?, ?)"
    )
    place.ledger._sql(sql, (run.key, state, retry and retry.key))


def test_a_success_stays_that_became_the_newest_as_the_later_ones_were_rolled_back(
    place: Place,
) -> None:
    for name in ("older", "newest", "undone", "undoes"):
        place.run(name)
    place.ledger._sql("UPDATE run SET rollback_of = 'undone' WHERE id = 'undoes'")
    success = place.ledger.last_success("sync")
    place.prune()
    assert place.left() == ["newest", "undone", "undoes"]
    assert place.ledger.last_success("sync") == success


def test_a_run_with_an_open_reject_stays_until_it_is_decided(place: Place) -> None:
    run = place.run("rejects")
    place.run("newest")
    make_reject(place, run, "open")
    assert place.prune().runs == []
    place.ledger._sql("UPDATE reject SET state = 'dropped'")
    assert [each.id for each in place.prune().runs] == ["rejects"]


@pytest.mark.parametrize("column", ["retry_of", "rollback_of"])
def test_a_run_goes_with_its_retries_and_rollbacks_or_not_at_all(place: Place, column: str) -> None:
    first, second = place.run("first"), place.run("second")
    make_reject(place, first, "retried", second)
    place.ledger._sql(f"UPDATE run SET {column} = 'first' WHERE id = 'second'")
    place.ledger._sql("UPDATE run SET ended_at = ? WHERE id = 'second'", (NEW,))
    place.run("newest")
    assert place.prune().runs == []
    place.ledger._sql("UPDATE run SET ended_at = ? WHERE id = 'second'", (OLD,))
    assert [run.id for run in place.prune().runs] == ["second", "first"]
    assert place.ledger._rows("PRAGMA foreign_key_check") == []


def test_a_run_with_a_pending_cleanup_stays(place: Place) -> None:
    run = place.run("cleans")
    place.run("newest")
    sql = (
        "INSERT INTO cleanup (run, generation, function, arguments, made_at)"
        " VALUES (?, 1, 'f', '{}', '')"
    )
    place.ledger._sql(sql, (run.key,))
    assert place.prune().runs == []
    place.ledger._sql("UPDATE cleanup SET done_at = ''")
    assert len(place.prune().runs) == 1


def test_what_was_done_once_stays_known_for_ever_and_its_run_once_it_is_settled(
    place: Place,
) -> None:
    run = place.run("sends")
    place.run("newest")
    sql = (
        "INSERT INTO operation (job, key, run, generation, number, arguments, claimed_at)"
        " VALUES ('sync', 'announce/1', ?, 1, 1, x'00', '')"
    )
    place.ledger._sql(sql, (run.key,))
    assert place.prune().runs == []  # nobody knows yet whether it was done
    place.ledger._sql("UPDATE operation SET outcome = 'done'")
    assert [each.id for each in place.prune().runs] == ["sends"]
    assert place.left() == ["sends", "newest"]  # the bare row
    assert place.ledger._rows("SELECT key, run FROM operation") == [("announce/1", run.key)]
    assert place.ledger._rows("SELECT 1 FROM batch WHERE run = ?", run.key) == []
    assert place.prune().runs == []  # not again and again


def test_the_newest_event_and_those_that_others_refer_to_stay(place: Place) -> None:
    run = place.run("old")
    place.run("newest")
    place.ledger._sql(
        "UPDATE attempt SET admitted = (SELECT max(id) FROM event WHERE run = ?1) WHERE run <> ?1",
        (run.key,),
    )
    place.ledger.note("someone", "said", "the newest", run=run)
    place.prune()
    assert place.left() == ["newest"]
    assert place.ledger._rows("PRAGMA foreign_key_check") == []
    assert len(place.ledger.events(what="said")) == 1


def test_behind_an_open_barrier_all_stays_that_it_found(place: Place) -> None:
    place.run("one")
    place.run("newest")
    opened_by = place.ledger.note("someone", "maintenance on")
    sql = "INSERT INTO barrier (device, inode, at, who, reason, opened) VALUES (1, 1, ?, '', '', ?)"
    place.ledger._sql(sql, ("2019-01-01T00:00:00.000Z", opened_by))
    assert place.prune().runs == []
    place.ledger._sql("UPDATE barrier SET closed = opened, closed_at = ?", (OLD,))
    assert len(place.prune().runs) == 1
    assert place.ledger._rows("SELECT * FROM barrier") == []


def test_alerts_go_with_their_deliveries_but_not_while_they_stand_or_are_to_be_told(
    place: Place,
) -> None:
    alert = "INSERT INTO alert (at, event, kind, about, why, todo, pending, closed_at)"
    for about, pending, closed_at in (
        *(("closed", "[]", OLD), ("stands", "[]", None)),
        *(("to be told", '["command"]', OLD), ("closed now", "[]", NEW)),
    ):
        row = (OLD, about, pending, closed_at)
        place.ledger._sql(f"{alert} VALUES (?, 1, 'late', ?, '', '', ?, ?)", row)
    sql = "INSERT INTO delivery (alert, way, at) SELECT id, 'command', at FROM alert"
    place.ledger._sql(sql)
    place.prune()
    left = "SELECT about FROM alert JOIN delivery d ON d.alert = alert.id ORDER BY d.id"
    assert place.ledger._rows(left) == [("stands",), ("to be told",), ("closed now",)]
    assert place.ledger._rows("SELECT count(*) FROM delivery") == [(3,)]


def test_since_when_a_job_is_expected_stays_known(place: Place) -> None:
    place.ledger.tick(["other"])
    place.ledger.note("someone", "said", "the newest")
    place.ledger._sql("UPDATE event SET at = ?", (OLD,))
    place.prune()
    assert place.ledger.first_met("other") == OLD


def test_a_run_that_became_needed_since_the_look_stays(place: Place) -> None:
    run = place.run("old")
    place.run("newest")
    make_reject(place, run, "open")
    assert place.ledger.prune(run, NEW) == (False, 0)
    assert place.left() == ["old", "newest"]


def test_files_go_while_others_can_write_and_keep_their_run_until_they_are_gone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = place.run("old")
    place.run("newest")

    def refuse(_: object) -> None:
        with contextlib.closing(place.state.open_ledger(create=False)) as other:
            other.note("another process", "wrote")
        raise PermissionError(13, "not yours")

    with monkeypatch.context() as patch:
        patch.setattr("batchrun.remove_files", refuse)
        with pytest.raises(PermissionError):
            place.prune()
    assert place.ledger.events(what="wrote") != []
    assert place.left() == ["old", "newest"]
    with pytest.raises(PersonNeeded, match="nothing to undo"):
        place.ledger.require_can_roll_back(place.ledger.rollback(place.ledger.run(run.key), 0))
    assert place.prune().files_bytes == 300
    assert place.left() == ["newest"]


def test_every_table_that_tells_of_runs_is_pruned_or_kept_on_purpose(place: Place) -> None:
    tables = place.ledger._rows("SELECT name FROM sqlite_schema WHERE type = 'table'")
    of_runs = {
        table
        for (table,) in tables
        for key in place.ledger._rows(f"PRAGMA foreign_key_list({table})")
        if key[2] == "run"
    }
    assert of_runs == {*ROWS_OF_A_RUN, "event", "operation", "run"}


# --- with processes -------------------------------------------------------------------------------


def make_old(project: Project) -> None:
    """Let all finished runs have ended long ago."""
    connection = apsw.Connection(str(project.state / "ledger.db"))
    connection.execute("UPDATE run SET ended_at = ? WHERE ended_at IS NOT NULL", (OLD,))
    connection.close()


def ids(project: Project) -> list[str]:
    return [row[0] for row in rows(project, "SELECT id FROM run ORDER BY key")]


def test_the_command_shows_what_would_go_and_then_lets_it_go(project: Project) -> None:
    write_job(project)
    assert project.run("run", "sync").code == 0
    assert project.run("run", "sync").code == 0
    first, second = ids(project)
    make_old(project)
    shown = project.run("prune", "--dry-run")
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert lines[1].startswith(f"{first}  sync  succeeded  {OLD}")
    assert lines[2].startswith("1 run that ended before ")
    assert lines[2].endswith(" would go")
    assert ids(project) == [first, second]
    gone = project.run("prune", "--json").document
    assert [run["id"] for run in gone["runs"]] == [first]
    assert gone["rows"] > 3
    assert ids(project) == [second]
    assert [path.stem for path in project.state.glob("logs/sync/*")] == [second]
    assert project.run("check") == Ended(0, "ledger and checkpoints agree\n", "")
    assert project.run("prune", "--keep", "soon").code == 2


def test_a_success_and_the_tick_prune_by_themselves(project: Project) -> None:
    write_job(project)
    for _ in range(2):
        assert project.run("run", "sync").code == 0
    make_old(project)
    first, second = ids(project)
    assert project.run("resume", "--all") == Ended(0, "", "")
    assert ids(project) == [second]
    assert project.run("run", "sync").code == 0
    assert ids(project)[0] != second
    assert len(ids(project)) == 1
    assert first not in ids(project)


def test_keep_0_keeps_for_ever(project: Project) -> None:
    write_job(project)
    path = project.folder / "batchrun.toml"
    path.write_text('keep = "0"\n' + path.read_text())
    for _ in range(2):
        assert project.run("run", "sync").code == 0
    make_old(project)
    assert project.run("resume", "--all").code == 0
    assert json.loads(project.run("prune", "--json").out)["runs"] == []
    assert len(ids(project)) == 2


@pytest.mark.parametrize("point", ["prune.commit=kill", "prune.commit=EIO"])
def test_pruning_that_is_cut_off_or_fails_harms_nothing_and_is_done_again(
    project: Project, point: str
) -> None:
    write_job(project)
    for _ in range(2):
        assert project.run("run", "sync").code == 0
    make_old(project)
    first, second = ids(project)
    cut = project.run("resume", "--all", env=at(point))
    assert cut.code == (-9 if "kill" in point else 0)
    assert ids(project) == [first, second]
    assert project.run("check").code == 0
    assert project.run("run", "sync").code == 0
    assert first not in ids(project)
    assert records(project) == 3 * list(range(1, 11))
