"""What several tests need: a project folder with real processes, PostgreSQL, the shared data.

Nothing here sleeps to let something else happen: `wait_for` looks until a condition holds, and
fails with words when it does not. All temporary files stay inside the clone, in .tmp/.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
TEMPORARY = ROOT / ".tmp"

# batchrun as a user's own process: no test code in it, never another installed copy, and nothing
# imported from the working directory (-P).
LAUNCH = (
    sys.executable,
    "-P",
    "-c",
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); from batchrun import main; main()",
)

# What the machine that runs the tests may have set and a user's shell may not.
NOT_INHERITED = (
    "BATCHRUN_",
    "PYTHONDONTWRITEBYTECODE",
    "PYTEST_",
    "JOURNAL_STREAM",
    "NOTIFY_SOCKET",
    "INVOCATION_ID",
    "COV_",
)


# --- temporary files inside the clone -------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Put pytest's temporary folders into the clone; remove those of sessions that are gone."""
    if config.option.basetemp is None:
        TEMPORARY.mkdir(exist_ok=True)
        for old in TEMPORARY.glob("pytest-*"):
            if not Path("/proc", old.name.removeprefix("pytest-")).exists():
                shutil.rmtree(old, ignore_errors=True)
        config.option.basetemp = str(TEMPORARY / f"pytest-{os.getpid()}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remove the temporary folders of a session that passed; a failed one's can be looked at."""
    base = Path(session.config.option.basetemp)
    if exitstatus == pytest.ExitCode.OK and base.parent == TEMPORARY:
        shutil.rmtree(base, ignore_errors=True)


# --- waiting --------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], T], what: str, *, limit_s: float = 30) -> T:
    """Return the condition's first true value; fail, saying what was waited for, after limit_s."""
    until = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > until:
            pytest.fail(f"waited {limit_s:g} s in vain for {what}; last seen: {value!r}")
        time.sleep(0.005)
    return value


# --- a project and its processes ------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a process ended: exit code (-N for signal N), standard output, standard error."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:  # noqa: ANN401 - whatever JSON a command prints
        """The one JSON document on standard output."""
        return json.loads(self.out)


@dataclass
class Project:
    """A folder with batchrun.toml and jobs/, and the batchrun processes started in it."""

    folder: Path
    outputs: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def write(self, config: str, **jobs: str) -> None:
        """Write batchrun.toml and jobs/NAME.py, readable and writable for the owner only.

        A config that says nothing of retries is given TRIED_ONCE.
        """
        (self.folder / "jobs").mkdir(mode=0o700, exist_ok=True)
        self.write_file("batchrun.toml", tried_once(dedent(config)))
        for name, text in jobs.items():
            self.write_file(f"jobs/{name}.py", text)

    def write_file(self, name: str, text: str) -> Path:
        """Write one file of the project, its text dedented; return its path."""
        path = self.folder / name
        path.write_text(dedent(text), encoding="utf-8")
        path.chmod(0o600)
        return path

    @property
    def state(self) -> Path:
        """The state directory, if the config does not say otherwise."""
        return self.folder / "state"

    def run(self, *words: str, limit_s: float = 60, **how: Any) -> Ended:  # noqa: ANN401 - see start
        """Run `batchrun WORDS` to its end; `how` is that of `start`."""
        return self.finish(self.start(*words, **how), limit_s=limit_s)

    def start(
        self,
        *words: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        umask: int = 0o022,
        launch: tuple[str, ...] = LAUNCH,
    ) -> subprocess.Popen[str]:
        """Start `batchrun WORDS` in a session of its own, its output going to files.

        Args:
            words: the words of the command line.
            cwd: the working directory; the project's folder if not given.
            env: all of the environment (`{}`: none, as from cron); else this one's, cleaned.
            umask: of the new process only.
            launch: the words before; `(".venv/bin/batchrun",)` for an installed one.
        """
        number = len(self.started)
        with (
            (self.outputs / f"{number}.out").open("w") as out,
            (self.outputs / f"{number}.err").open("w") as err,
        ):
            process = subprocess.Popen(
                [*launch, *words],
                cwd=cwd or self.folder,
                env=clean_environment() if env is None else env,
                umask=umask,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                text=True,
            )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], *, limit_s: float = 60) -> Ended:
        """Wait for the end of a started process and return it; fail with its output if too late."""
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            ended = self.output(process, code=0)
            pytest.fail(f"{process.args!r} still runs after {limit_s:g} s:\n{ended.out}{ended.err}")
        return self.output(process, code)

    def output(self, process: subprocess.Popen[str], code: int) -> Ended:
        """Return what the process has written so far."""
        number = self.started.index(process)
        out, err = (self.outputs / f"{number}.{end}" for end in ("out", "err"))
        return Ended(code, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8"))

    def living(self) -> list[int]:
        """Return the pids of all processes of this project: by session, or by working directory."""
        sessions = {process.pid for process in self.started}
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [pid for pid in pids if pid != os.getpid() and self._is_ours(pid, sessions)]

    def _is_ours(self, pid: int, sessions: set[int]) -> bool:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return False  # ended, only not yet asked for by its parent
            folder = Path(f"/proc/{pid}/cwd").readlink()
            return os.getsid(pid) in sessions or folder.is_relative_to(self.folder)
        return False

    def kill_all(self) -> None:
        """Kill every process of this project and wait until none is left."""

        def none_left() -> bool:
            for pid in self.living():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not self.living()

        wait_for(none_left, f"the processes of {self.folder} to be gone")
        for process in self.started:
            process.wait()  # none lives any more: this only takes away what is left of it


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what would change how batchrun behaves."""
    return {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}


# Most tests look at what one attempt leaves behind; those of section 12 look at the next ones.
TRIED_ONCE = 'retry_for = "0"\non_exhausted = "fail"\n'


def tried_once(config: str) -> str:
    """Return a config in which a batch is tried once and then fails, unless it says otherwise."""
    if "max_tries" in config or "retry_for" in config:
        return config
    if "[defaults]\n" not in config:
        return f"{config.rstrip()}\n[defaults]\n{TRIED_ONCE}"
    return config.replace("[defaults]\n", f"[defaults]\n{TRIED_ONCE}", 1)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """An empty project folder; whatever was started in it is killed afterwards."""
    made = empty_project(tmp_path)
    yield made
    made.kill_all()


def empty_project(within: Path) -> Project:
    """Make the folders of a project, `shop` and `outputs`."""
    folder, outputs = within / "shop", within / "outputs"
    for path in (folder, outputs):
        path.mkdir(mode=0o700)
    return Project(folder, outputs)


TWO_ATTEMPTS = """
[defaults]
batch_size = 10
max_rejects = 5
max_tries = 2
retry_for = "1m"
retry_first_wait = "1ms"
[jobs.sync]
"""
SYNC = """
from pathlib import Path
from batchrun import job

def remove(*, name): pass

@job
def sync(ctx):
    BEGIN
    for batch in ctx.batches(list(range(1, 51))):
        if 33 in batch.records:
            batch.reject(33, REASON)
            if not Path("failed").exists():
                Path("failed").touch()
                raise ValueError(ERROR)
        yield batch
"""


def run_in_two_attempts(within: Path, *begin: str, reason: str, error: str) -> tuple[Project, int]:
    """Run a job over fifty records to its end: record 33 is rejected, and its batch fails once.

    Returns the project, and the exit code.
    """
    made = empty_project(within)
    text = SYNC.replace("BEGIN", "\n    ".join(begin))
    made.write(
        TWO_ATTEMPTS, sync=text.replace("REASON", repr(reason)).replace("ERROR", repr(error))
    )
    return made, made.run("run", "sync").code


# --- the outside ----------------------------------------------------------------------------------


@pytest.fixture
def shared_data() -> Path:
    """The folder with the real stock data that may lie beside the clone."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("NO REAL DATA: ../shared/data is not beside the clone")
    return folder


@pytest.fixture
def postgres_dsn() -> Iterator[str]:
    """The URL of an empty PostgreSQL database of this test's own."""
    server = os.environ.get("BATCHRUN_TEST_POSTGRES")
    if not server:
        pytest.skip("NO POSTGRESQL: BATCHRUN_TEST_POSTGRES names no server (.ci/run starts one)")
    psycopg = pytest.importorskip("psycopg", reason="NO PSYCOPG: install '.[test]'")
    name = f"batchrun_test_{secrets.token_hex(6)}"
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
        yield urlsplit(server)._replace(path=f"/{name}").geturl()
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
