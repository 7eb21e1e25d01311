"""What Prometheus reads: one file, whole at any time, in a format that promtool accepts."""

import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, Ended, Project
from test_11_worker import run_row, write_job

from batchrun import LABEL, METRICS, render_metric, render_metrics

OTHERS = (
    "build_info",
    "tick_timestamp_seconds",
    "run_state",
    "maintenance_overdue",
    "maintenance_age_seconds",
)

TEXT = """\
# HELP batchrun_build_info The version of batchrun.
# TYPE batchrun_build_info gauge
batchrun_build_info{version="0.1.0"} 1
# HELP batchrun_untold_alerts Alerts that have not reached somebody.
# TYPE batchrun_untold_alerts gauge
batchrun_untold_alerts 0
# HELP batchrun_maintenance 1 while maintenance is on.
# TYPE batchrun_maintenance gauge
batchrun_maintenance 0
# HELP batchrun_maintenance_overdue 1 if it should be over by now.
# TYPE batchrun_maintenance_overdue gauge
batchrun_maintenance_overdue 0
# HELP batchrun_last_success_timestamp_seconds When it succeeded last.
# TYPE batchrun_last_success_timestamp_seconds gauge
batchrun_last_success_timestamp_seconds{batch_job="sync"} MOMENT
# HELP batchrun_last_success_duration_seconds From begin to end of that run.
# TYPE batchrun_last_success_duration_seconds gauge
batchrun_last_success_duration_seconds{batch_job="sync"} SECONDS
# HELP batchrun_run_records Records read by the newest run.
# TYPE batchrun_run_records gauge
batchrun_run_records{batch_job="sync"} 10
# HELP batchrun_run_expected_records Records that its source has, if that is known.
# TYPE batchrun_run_expected_records gauge
batchrun_run_expected_records{batch_job="sync"} 10
# HELP batchrun_run_rejected_records Records rejected by the newest run.
# TYPE batchrun_run_rejected_records gauge
batchrun_run_rejected_records{batch_job="sync"} 0
# HELP batchrun_run_paused_seconds For how long health kept the newest run paused.
# TYPE batchrun_run_paused_seconds gauge
batchrun_run_paused_seconds{batch_job="sync"} 0.0
# HELP batchrun_skipped_starts Starts refused since the last success.
# TYPE batchrun_skipped_starts gauge
batchrun_skipped_starts{batch_job="sync"} 0
batchrun_skipped_starts{batch_job="never"} 0
# HELP batchrun_open_operations External operations whose outcome is not known.
# TYPE batchrun_open_operations gauge
batchrun_open_operations{batch_job="sync"} 0
batchrun_open_operations{batch_job="never"} 0
# HELP batchrun_open_rejects Rejected records that wait for a person.
# TYPE batchrun_open_rejects gauge
batchrun_open_rejects{batch_job="sync"} 0
batchrun_open_rejects{batch_job="never"} 0
# HELP batchrun_late 1 if no success came within expect_every.
# TYPE batchrun_late gauge
batchrun_late{batch_job="sync"} 0
batchrun_late{batch_job="never"} 0
# HELP batchrun_stalled 1 if the newest run has an owner and gets nothing done.
# TYPE batchrun_stalled gauge
batchrun_stalled{batch_job="sync"} 0
batchrun_stalled{batch_job="never"} 0
# HELP batchrun_run_state 1 for its state.
# TYPE batchrun_run_state gauge
"""


def write(project: Project, top: str = "") -> Path:
    """Write two jobs, one of which never runs; return the config's path."""
    write_job(project)
    path = project.folder / "batchrun.toml"
    path.write_text(f'{top}{path.read_text()}[jobs.never]\nuses = "sync"\n')
    return path


def sample(text: str, name: str) -> list[str]:
    """Return the samples of one metric, without its name."""
    return re.findall(rf"^batchrun_{name}(?=[{{ ])(.*)$", text, re.MULTILINE)


def test_the_metrics_of_a_job_that_succeeded_and_of_one_that_never_ran(project: Project) -> None:
    write(project)
    assert project.run("run", "sync") == Ended(0, "", "")
    shown = project.run("metrics")
    assert (shown.code, shown.err) == (0, "")
    head, _, _ = shown.out.partition("batchrun_run_state{")
    head = re.sub(r"(timestamp_seconds.*) \d{10}\.\d+", r"\1 MOMENT", head)
    head = re.sub(r"(duration_seconds.*) \d+\.\d+", r"\1 SECONDS", head)
    assert head == TEXT
    lines = sample(shown.out, "run_state")
    assert len(lines) == 18
    assert [line for line in lines if line.endswith(" 1")] == [
        '{batch_job="sync",state="succeeded"} 1'
    ]


def promtool() -> str:
    found = shutil.which("promtool")
    if not found:
        pytest.skip("NO PROMTOOL: Debian's package prometheus has it (.ci/run installs it)")
    return found


def test_promtool_finds_nothing_wrong(project: Project) -> None:
    check = promtool()
    write(project)
    assert project.run("maintenance", "on", "--until", "+1s").code == 0
    assert project.run("maintenance", "off").code == 0
    assert project.run("run", "sync").code == 0
    assert project.run("maintenance", "on").code == 0
    assert project.run("resume", "--all").code == 0
    text = project.run("metrics").out
    linted = subprocess.run(
        [check, "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (linted.returncode, linted.stdout, linted.stderr) == (0, "", "")
    for name in ("tick_timestamp_seconds", "maintenance_age_seconds"):
        assert len(sample(text, name)) == 1
    bad = subprocess.run([check, "check", "metrics"], input="a b c\n", text=True, check=False)
    assert bad.returncode


def test_promtool_accepts_the_rules_of_the_readme(tmp_path: Path) -> None:
    check, rules = promtool(), tmp_path / "rules.yml"
    readme = (ROOT / "README.md").read_text()
    (text,) = re.findall(r"^```yaml\n(groups:.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    rules.write_text(text)
    names = set(re.findall(r"batchrun_\w+", text))
    known = {f"batchrun_{name}" for name in (*METRICS, *OTHERS)}
    assert names - known == set()
    words = [check, "check", "rules", str(rules)]
    checked = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "5 rules found" in checked.stdout


SCRAPED = """
rule_files: [rules.yml]
evaluation_interval: 1h
tests:
  - interval: 1h
    input_series:
      - series: batchrun_last_success_timestamp_seconds{LABELS}
        values: 0x60
    alert_rule_test:
      - {eval_time: 27h, alertname: BatchrunTooOld, exp_alerts: [{exp_labels: {WANTED}}]}
      - {eval_time: 27h, alertname: BatchrunNeverSucceeded, exp_alerts: []}
  - interval: 1h
    alert_rule_test:
      - eval_time: 27h
        alertname: BatchrunNeverSucceeded
        exp_alerts: [{exp_labels: {batch_job: inventory_sync}}]
"""


def test_the_rules_of_the_readme_fire_for_what_prometheus_makes_of_the_labels(
    tmp_path: Path,
) -> None:
    check = promtool()
    readme = (ROOT / "README.md").read_text()
    (text,) = re.findall(r"^```yaml\n(groups:.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (tmp_path / "rules.yml").write_text(text)
    (*_, sample) = render_metric("late", "", [({LABEL: "inventory_sync"}, 1)])
    ours = sample.partition("{")[2].partition("}")[0]
    assert not re.search(r"\b(job|instance)=", ours)  # Prometheus has these, and renames ours
    scraped = f'{ours},job="node",instance="h:9100"'
    wanted = scraped.replace('="', ': "').replace(",", ", ")
    tests = SCRAPED.replace("LABELS", scraped).replace("WANTED", wanted)
    (tmp_path / "tests.yml").write_text(tests)
    words = [check, "test", "rules", str(tmp_path / "tests.yml")]
    checked = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout


def test_labels_are_escaped() -> None:
    assert render_metric("late", "Means.", [({"job": 'a"b\\c\nd'}, "yes")]) == [
        "# HELP batchrun_late Means.",
        "# TYPE batchrun_late gauge",
        'batchrun_late{job="a\\"b\\\\c\\nd"} 1',
    ]
    assert render_metric("late", "Means.", [({}, None)]) == []


def test_without_a_job_there_still_are_metrics() -> None:
    text = render_metrics([], None, "2026-01-31T00:00:00.000Z", "2026-01-30T23:55:00.500Z", 2)
    assert sample(text, "tick_timestamp_seconds") == [" 1769817300.5"]
    assert sample(text, "untold_alerts") == [" 2"]


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_file_is_replaced_whole_and_readable_by_everybody(project: Project, umask: int) -> None:
    write(project)
    assert project.run("run", "sync").code == 0
    folder = project.folder / "textfiles"
    folder.mkdir()
    before = folder / "batchrun.prom"
    before.write_text("old")
    old = before.stat().st_ino
    assert project.run("metrics", "--write", "textfiles", umask=umask) == Ended(0, "", "")
    assert stat.S_IMODE(before.stat().st_mode) == 0o644
    assert before.stat().st_ino != old
    assert before.read_text() == project.run("metrics").out
    assert list(folder.iterdir()) == [before]


def test_a_folder_that_is_not_there_is_told_of(project: Project) -> None:
    write(project)
    assert project.run("run", "sync").code == 0
    ended = project.run("metrics", "--write", "nowhere")
    why = "nowhere/batchrun.prom cannot be written: No such file or directory.\n"
    assert ended == Ended(2, "", why)
    (project.folder / "taken" / "batchrun.prom").mkdir(parents=True)
    ended = project.run("metrics", "--write", "taken")
    assert ended == Ended(2, "", "taken/batchrun.prom cannot be written: Is a directory.\n")


def test_doctor_finds_a_folder_that_the_metrics_cannot_be_written_to(project: Project) -> None:
    write(project, 'metrics_folder = "textfiles"\n')
    folder = project.folder / "textfiles"

    def found() -> list[str]:
        examined = project.run("--json", "doctor").document["examined"]
        return [f"{r['answer']} {r['todo']}" for r in examined if r["name"] == "metrics_folder"]

    assert found() == [f"{folder} cannot be written to ls -ld {folder}"]
    folder.mkdir()
    assert found() == [f"{folder} can be written to "]


def test_the_file_is_written_after_each_run_and_tick_and_never_fails_one(project: Project) -> None:
    write(project, 'metrics_folder = "textfiles"\n')
    folder = project.folder / "textfiles"
    why = (
        f"warning: metrics_folder: {folder}/batchrun.prom cannot be written:"
        " No such file or directory. No run is changed by that.\n"
    )
    assert project.run("run", "sync") == Ended(0, "", why)
    assert project.run("resume", "--all") == Ended(0, "", "")  # each five minutes: not from cron
    assert why in project.run("-v", "resume", "--all").err
    folder.mkdir()
    path = folder / "batchrun.prom"
    assert project.run("run", "sync") == Ended(0, "", "")
    first = path.read_text()
    assert len(sample(first, "last_success_timestamp_seconds")) == 1
    assert project.run("resume", "--all") == Ended(0, "", "")
    assert len(sample(path.read_text(), "tick_timestamp_seconds")) == 1
    assert run_row(project)[0] == "succeeded"
    path.unlink()
    path.mkdir()
    assert project.run("run", "sync") == Ended(0, "", why.replace("No such file or", "Is a"))
