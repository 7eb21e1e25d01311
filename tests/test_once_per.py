"""A job that is to succeed once per day, week or month in a zone, however often a timer fires."""

import json
from pathlib import Path

import pytest
from conftest import Ended, Project, wait_for
from test_11_worker import let_go, rows
from test_12_supervisor import launch_with

from batchrun import ConfigurationError, load_config, period_of

CONFIG = """\
min_free = "1MB"
[jobs.sync]
once_per = "day"
zone = "Europe/Berlin"
"""
JOB = """\
import time
from pathlib import Path
from batchrun import job

@job
def sync(ctx):
    for batch in ctx.batches([1, 2, 3]):
        FIRST
        yield batch
"""
# In Berlin the clock went back from 03:00 to 02:00 on 2026-10-25, at 01:00 UTC.
FIRST_HALF_PAST_TWO, SECOND_HALF_PAST_TWO = "2026-10-25T00:30:00.000Z", "2026-10-25T01:30:00.000Z"


@pytest.fixture
def shop(project: Project) -> Project:
    project.write(CONFIG, sync=JOB.replace("FIRST", "pass"))
    return project


def run_at(project: Project, moment: str, *words: str) -> Ended:
    """Run `batchrun WORDS` (by default `run sync`) while the wall clock shows this moment."""
    clock = f"batchrun.datetime.fromisoformat({moment!r}).timestamp() + seconds"
    launch = launch_with(
        f"batchrun.Host.later = lambda _, seconds: batchrun.utc_text(int(1e9 * ({clock})))"
    )
    return project.run(*(words or ("run", "sync")), launch=launch)


def states(project: Project) -> list[str]:
    return [state for (state,) in rows(project, "SELECT state FROM run ORDER BY key")]


def skipped(project: Project) -> list[str]:
    sql = "SELECT why FROM event WHERE what = 'skipped: once per period' AND job = 'sync'"
    return [why for (why,) in rows(project, sql)]


# --- K43 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", ["2026-10-25T00:30:00.200Z", SECOND_HALF_PAST_TWO])
def test_two_launches_on_the_day_the_clock_goes_back_are_one_run_and_one_row(
    shop: Project, second: str
) -> None:
    for moment in (FIRST_HALF_PAST_TWO, second):
        assert run_at(shop, moment) == Ended(0, "", "")
    assert states(shop) == ["succeeded"]
    (run,) = rows(shop, "SELECT id FROM run")[0]
    words = f"sync has succeeded in this day already (2026-10-25, Europe/Berlin: run {run});"
    assert skipped(shop) == [f"{words} to run it once more: batchrun run sync --fresh"]


def test_a_launch_beside_the_one_that_is_going_on_is_busy_and_one_row(shop: Project) -> None:
    hold = "Path('go.reached').touch()\n        while not Path('go').exists(): time.sleep(0.002)"
    shop.write(CONFIG, sync=JOB.replace("FIRST", hold))
    first = shop.start("run", "sync")
    wait_for((shop.folder / "go.reached").exists, "the first to work")
    assert shop.run("run", "sync").code == 11
    let_go(shop)
    assert shop.finish(first).code == 0
    assert states(shop) == ["succeeded"]
    assert rows(shop, "SELECT count(*) FROM event WHERE what = 'refused: busy'") == [(1,)]


# --- what begins and what does not --------------------------------------------------------------


def test_the_next_day_of_the_zone_begins_a_run_and_not_that_of_utc(shop: Project) -> None:
    moments = {
        "2026-07-01T21:59:00.000Z": 1,  # 23:59 in Berlin
        "2026-07-01T22:01:00.000Z": 2,  # 00:01 on the next day
        "2026-07-02T00:01:00.000Z": 2,  # the next day in UTC only
        "2026-07-02T21:59:00.000Z": 2,
        "2026-07-02T22:01:00.000Z": 3,
    }
    for moment, runs in moments.items():
        assert run_at(shop, moment).code == 0
        assert len(states(shop)) == runs, moment


def test_a_run_that_has_not_succeeded_goes_on_and_counts_where_it_ends(shop: Project) -> None:
    shop.write(CONFIG, sync=JOB.replace("FIRST", "1 / 0"))
    assert run_at(shop, "2026-07-01T10:00:00.000Z").code == 1
    shop.write(CONFIG, sync=JOB.replace("FIRST", "pass"))
    assert run_at(shop, "2026-07-02T10:00:00.000Z").code == 0
    assert states(shop) == ["succeeded"], "the same run"
    assert run_at(shop, "2026-07-02T11:00:00.000Z").code == 0
    assert len(skipped(shop)) == 1


def test_fresh_begins_all_the_same_and_without_the_key_every_start_does(shop: Project) -> None:
    for words in (("run", "sync"), ("run", "sync", "--fresh"), ("run", "sync")):
        assert run_at(shop, FIRST_HALF_PAST_TWO, *words).code == 0
    assert (len(states(shop)), len(skipped(shop))) == (2, 1)
    shop.write_file("batchrun.toml", CONFIG.replace('"day"', '""'))
    assert run_at(shop, FIRST_HALF_PAST_TWO).code == 0
    assert len(states(shop)) == 3


def test_a_start_that_is_not_needed_says_so_in_one_line(shop: Project) -> None:
    assert shop.run("run", "sync").code == 0
    told = shop.run("run", "sync", "-v")
    last = told.err.splitlines()[-1]
    assert (told.code, last.startswith("sync has succeeded in this day already (")) == (0, True)
    told = shop.run("run", "sync", "--json")
    assert [json.loads(line)["type"] for line in told.out.splitlines()] == ["said"]


def test_the_tick_and_resume_begin_nothing_and_skip_nothing(shop: Project) -> None:
    assert shop.run("run", "sync", "--batches", "1").code in (0, 75)
    assert shop.run("resume", "--all").code == 0
    assert shop.run("resume", "sync").code == 0
    assert (states(shop), skipped(shop)) == (["succeeded"], [])


# --- periods and their zone ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "once_per", "zone", "period"),
    [
        (FIRST_HALF_PAST_TWO, "day", "Europe/Berlin", "2026-10-25"),
        (SECOND_HALF_PAST_TWO, "day", "Europe/Berlin", "2026-10-25"),
        ("2026-10-24T21:59:59.999Z", "day", "Europe/Berlin", "2026-10-24"),
        ("2026-10-24T22:00:00.000Z", "day", "Europe/Berlin", "2026-10-25"),
        ("2026-10-25T22:59:59.999Z", "day", "Europe/Berlin", "2026-10-25"),  # a day of 25 hours
        ("2026-10-25T23:00:00.000Z", "day", "Europe/Berlin", "2026-10-26"),
        ("2026-12-31T23:30:00.000Z", "month", "Europe/Berlin", "2027-01"),
        ("2026-12-31T23:30:00.000Z", "month", "UTC", "2026-12"),
        ("2027-01-03T22:59:00.000Z", "week", "Europe/Berlin", "2026-W53"),  # a Sunday
        ("2027-01-03T23:00:00.000Z", "week", "Europe/Berlin", "2027-W01"),
        ("2026-06-30T11:00:00.000Z", "day", "Pacific/Kiritimati", "2026-07-01"),
    ],
)
def test_a_moment_belongs_to_the_period_that_its_zone_has_then(
    moment: str, once_per: str, zone: str, period: str
) -> None:
    assert period_of(moment, once_per, zone) == period


@pytest.mark.parametrize(
    "zone", ["Europe/Berlinn", "Europe", "../etc/passwd", "/etc/passwd", "", 2]
)
def test_a_zone_that_this_machine_does_not_know_is_refused(tmp_path: Path, zone: object) -> None:
    path = tmp_path / "batchrun.toml"
    path.write_text(CONFIG.replace('"Europe/Berlin"', json.dumps(zone)))
    with pytest.raises(ConfigurationError) as refusal:
        load_config(path)
    words = 'a time zone of this machine, such as "Europe/Berlin", is wanted'
    assert words in str(refusal.value)


def test_a_period_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "batchrun.toml"
    path.write_text(CONFIG.replace('"day"', '"hour"'))
    with pytest.raises(ConfigurationError, match='"day", "week", "month" or "" is wanted'):
        load_config(path)
