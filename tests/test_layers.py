"""batchrun.py keeps the shape that its docstring promises.

Sections in order, each using only what stands above it; each library used only by its owner; no
section, function or command too long; none of the words that the project does without; no path
that exists on one machine only. The checks read the text with `ast` and run nothing. Each returns
its complaints, and the second half of this file proves on small made-up sources that each can fail.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LINES = {  # section, in order -> the most lines it may have; only a new capability raises one
    "Vocabulary": 615,
    "Host": 855,
    "Configuration": 1_250,
    "Checkpoints": 535,
    "Ledger": 2_690,
    "Locks and maintenance": 435,
    "Health": 840,
    "Jobs": 2_920,
    "Operations": 630,
    "Recovery": 1_165,
    "Worker": 950,
    "Supervisor": 1_985,
    "Reports": 1_555,
    "Command line": 1_805,
}
COMES_LATER = set[str]()  # their place in the order is kept
LINES_IN_ALL = 18_356  # must stay under
LINES_OF_A_FUNCTION = 40  # must stay under, from `def` to the end, its docstring not counted
LINES_OF_A_COMMAND = 25  # at most, counted the same way

OWNERS = {  # library -> the sections that may use it; any section may use one not named here
    "apsw": {"Ledger", "Health", "Jobs"},
    "click": {"Command line"},
    "ctypes": {"Host"},
    "filelock": {"Locks and maintenance"},
    "multiprocessing": set[str](),
    "pickle": set[str](),
    "psutil": {"Host"},
    "psycopg": {"Health", "Jobs"},
    "shelve": set[str](),
    "sqlite3": {"Jobs"},  # only to know a connection that a job brings
    "subprocess": {"Host", "Health", "Supervisor"},
    "threading": {"Host", "Health", "Operations", "Worker"},
    "time": {"Host"},
    "tomllib": {"Configuration"},
}
CLOCKS = {"now", "utcnow", "today"}  # of datetime's classes: only the Host asks what time it is

# Words that a name of ours may not have as one of its parts (`snake_case` or `CamelCase`).
# "offset" is allowed beside "byte"; "status" only as a name of a command, not of a field.
FORBIDDEN = re.compile(
    "task|pipeline|chunk|page|bookmark|dest|manager|handler|helper|util|service|flag|impl|info|data"
)


# --- reading the source ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """One part of the file: number from 1 in order, lines from its banner to before the next."""

    number: int
    name: str
    first: int
    last: int


HEADER = "the header"  # docstring and imports, above section 1: theirs is everybody's


class Source:
    """The text of batchrun.py and what the checks ask about it."""

    banner = re.compile(r"^(# ={86})\n# (\d+)\. ([^:\n]+): \S.*\n\1$", re.MULTILINE)

    def __init__(self, text: str, name: str = "batchrun.py") -> None:
        self.text = text
        self.name = name
        self.tree = ast.parse(text)

    @cached_property
    def sections(self) -> list[Section]:
        """The sections in the order of the file, after the header (number 0)."""
        found = [(0, HEADER, 1)] + [
            (int(match[2]), match[3], self.text.count("\n", 0, match.start()) + 1)
            for match in self.banner.finditer(self.text)
        ]
        ends = [first - 1 for _, _, first in found[1:]] + [len(self.text.splitlines())]
        return [Section(*start, last=end) for start, end in zip(found, ends, strict=True)]

    def section_at(self, line: int) -> Section:
        return next(s for s in reversed(self.sections) if s.first <= line)

    def at(self, line: int) -> str:
        """Where a line is: file, line and section."""
        section = self.section_at(line)
        return f"{self.name}:{line} ({f'{section.number}. ' * (section.number > 0)}{section.name})"

    @cached_property
    def definitions(self) -> dict[str, int]:
        """The file's own names (not its imports) -> the line that defines them first."""
        lines: dict[str, int] = {}
        for name, line in bound_names(self.tree.body, imports=False):
            lines.setdefault(name, line)
        return lines

    @cached_property
    def libraries(self) -> dict[str, str]:
        """The names that the file's own imports bind -> the library each comes from."""
        nodes = [node for node in walk_scope(self.tree.body) if is_import(node)]
        return {name: library for node in nodes for name, library in imported(node)}

    @cached_property
    def uses(self) -> list[tuple[str, int]]:
        """Each (name, line) at which Python would look a name up in the module."""
        reader = GlobalNames()
        reader.visit(self.tree)
        return reader.found

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        found = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [node for node in ast.walk(self.tree) if isinstance(node, found)]


SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def walk_scope(nodes: list[ast.stmt] | list[ast.expr]) -> Iterator[ast.AST]:
    """Yield the nodes and all below them, but nothing inside an inner function or class."""
    for node in nodes:
        yield node
        if not isinstance(node, SCOPES):
            yield from walk_scope(list(ast.iter_child_nodes(node)))  # type: ignore[arg-type]


def is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def imported(node: ast.AST) -> list[tuple[str, str]]:
    """Return (bound name, library) of one import statement."""
    if isinstance(node, ast.ImportFrom):
        library = (node.module or "").partition(".")[0]
        return [(alias.asname or alias.name, library) for alias in node.names]
    assert isinstance(node, ast.Import)
    roots = [(alias, alias.name.partition(".")[0]) for alias in node.names]
    return [(alias.asname or root, root) for alias, root in roots]


NAMED = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
    *(ast.ExceptHandler, ast.MatchAs, ast.MatchStar),
)


def bound_names(body: list[ast.stmt], *, imports: bool) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of each name that these statements bind in their own scope."""
    nodes = list(walk_scope(body))
    elsewhere = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    for node in nodes:
        for name in names_bound_by(node, imports=imports):
            if name is not None and name not in elsewhere:
                yield name, getattr(node, "lineno", 0)


def names_bound_by(node: ast.AST, *, imports: bool) -> list[str | None]:
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, NAMED):
        return [node.name]
    if isinstance(node, ast.MatchMapping):
        return [node.rest]
    return [name for name, _ in imported(node)] if imports and is_import(node) else []


def arguments_of(arguments: ast.arguments) -> list[ast.arg]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return named + [argument for argument in (arguments.vararg, arguments.kwarg) if argument]


class GlobalNames(ast.NodeVisitor):
    """Finds the names that are looked up in the module: those that no scope around them binds.

    Annotations count, also in quotes (but not the words of a `Literal`). What a comprehension
    binds is taken as bound in the whole function: that can hide a use, never invent one.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []
        self.scopes: list[tuple[bool, set[str]]] = []  # (of a class, the names it binds)

    def visit_Name(self, node: ast.Name) -> None:
        self._use(node.id, node.lineno)

    def visit_Global(self, node: ast.Global) -> None:
        for name in node.names:
            self._use(name, node.lineno)

    def _use(self, name: str, line: int) -> None:
        if not any(name in names for _, names in self.scopes):
            self.found.append((name, line))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        names = {name for name, _ in bound_names(node.body, imports=True)}
        self._visit_inside(node.body, names, of_class=True)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._visit_all(node.decorator_list)
        self._visit_arguments(node.args)
        self._visit_annotation(node.returns)
        names = {name for name, _ in bound_names(node.body, imports=True)}
        self._visit_inside(node.body, names | {a.arg for a in arguments_of(node.args)})

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast's name

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_arguments(node.args)
        self._visit_inside([node.body], {a.arg for a in arguments_of(node.args)})

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_annotation(node.annotation)
        self._visit_all([node.target] + ([node.value] if node.value else []))

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self._visit_comprehension(node.generators, [node.elt])

    visit_SetComp = visit_ListComp  # noqa: N815 - ast's name
    visit_GeneratorExp = visit_ListComp  # noqa: N815 - ast's name

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._visit_comprehension(node.generators, [node.key, node.value])

    def _visit_comprehension(self, loops: list[ast.comprehension], results: list[ast.expr]) -> None:
        targets = [node for loop in loops for node in ast.walk(loop.target)]
        names = {node.id for node in targets if isinstance(node, ast.Name)}
        self._visit_inside([*loops, *results], names)

    def _visit_arguments(self, arguments: ast.arguments) -> None:
        self._visit_all([*arguments.defaults, *filter(None, arguments.kw_defaults)])
        for argument in arguments_of(arguments):
            self._visit_annotation(argument.annotation)

    def _visit_annotation(self, node: ast.expr | None) -> None:
        if node is None:
            return
        words = {
            id(word)
            for part in ast.walk(node)
            if isinstance(part, ast.Subscript) and "Literal" in ast.unparse(part.value)
            for word in ast.walk(part.slice)
        }
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                self._use(part.id, part.lineno)
            elif isinstance(part, ast.Constant) and id(part) not in words:
                self._use_quoted(part)

    def _use_quoted(self, node: ast.Constant) -> None:
        for name in re.findall(r"(?<![.\w])[A-Za-z_]\w*", str(node.value)):
            self._use(name, node.lineno)

    def _visit_inside(
        self,
        nodes: list[ast.stmt] | list[ast.AST] | list[ast.expr],
        names: set[str],
        *,
        of_class: bool = False,
    ) -> None:
        outer = self.scopes
        if not of_class:  # the names of a class body are not seen from its methods
            self.scopes = [scope for scope in outer if not scope[0]]
        self.scopes = [*self.scopes, (of_class, names)]
        self._visit_all(nodes)
        self.scopes = outer

    def _visit_all(self, nodes: list[ast.stmt] | list[ast.AST] | list[ast.expr]) -> None:
        for node in nodes:
            self.visit(node)


# --- the checks: each returns its complaints ------------------------------------------------------


def sections_out_of_order(source: Source) -> list[str]:
    found = [f"{section.number}. {section.name}" for section in source.sections[1:]]
    order = {name: f"{number}. {name}" for number, name in enumerate(LINES, 1)}
    wanted = [line for name, line in order.items() if name not in COMES_LATER or line in found]
    return [] if found == wanted else [f"sections are {found}, should be {wanted}"]


def sections_not_in_the_docstring(source: Source) -> list[str]:
    text = ast.get_docstring(source.tree) or ""
    return [
        f"{source.name}: the module docstring does not name {name!r}"
        for name in LINES
        if name not in COMES_LATER and not re.search(rf"\b{name}\b", text)
    ]


def uses_of_what_stands_below(source: Source) -> list[str]:
    complaints = []
    for name, line in source.uses:
        defined = source.definitions.get(name, line)
        if source.section_at(defined).number > source.section_at(line).number:
            complaints.append(f"{source.at(line)} uses {name}, defined at {source.at(defined)}")
    return complaints


def libraries_used_by_others(source: Source) -> list[str]:
    used = [
        (source.libraries[name], line) for name, line in source.uses if name in source.libraries
    ]
    lazily = [
        (library, node.lineno)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for _, library in imported(node)
    ]
    return [
        f"{source.at(line)} uses {library}, which belongs to {sorted(OWNERS[library]) or 'nobody'}"
        for library, line in sorted({*used, *lazily}, key=lambda use: (use[1], use[0]))
        if library in OWNERS and source.section_at(line).name not in {*OWNERS[library], HEADER}
    ]


def clocks_read_outside_the_host(source: Source) -> list[str]:
    return [
        f"{source.at(node.lineno)} reads a clock: {ast.unparse(node)}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
        and node.attr in CLOCKS
        and {"datetime", "date"}
        & {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        and source.section_at(node.lineno).name != "Host"
    ]


def sections_too_long(source: Source) -> list[str]:
    complaints = []
    for section in source.sections[1:]:
        lines, limit = section.last - section.first + 1, LINES.get(section.name, 0)
        if lines > limit:
            complaints.append(f"{source.at(section.first)} has {lines} lines, {limit} at most")
    lines = source.sections[-1].last
    if lines >= LINES_IN_ALL:
        complaints.append(f"{source.name} has {lines} lines, should be under {LINES_IN_ALL}")
    return complaints


def functions_too_long(source: Source) -> list[str]:
    complaints = []
    for function in source.functions:
        lines, limit = code_lines(function), LINES_OF_A_FUNCTION - 1
        if any(is_command(decorator) for decorator in function.decorator_list):
            limit = LINES_OF_A_COMMAND
        if lines > limit:
            where = source.at(function.lineno)
            complaints.append(f"{where} {function.name} has {lines} lines of code, {limit} at most")
    return complaints


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines from `def` to the end, without the docstring's."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is None:
        return lines
    return lines - ((first.end_lineno or first.lineno) - first.lineno + 1)


def is_command(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and getattr(decorator.func, "attr", "") == "command"


def words_we_do_without(source: Source) -> list[str]:
    complaints = []
    for name, line in sorted(set(named_by_us(source.tree)), key=lambda found: found[1]):
        parts = re.findall(r"[a-z]+|[A-Z]+(?![a-z])|[A-Z][a-z]*", name)
        words = {part.lower() for part in parts}
        wrong = {word for word in words if FORBIDDEN.fullmatch(word.removesuffix("s"))}
        if "offset" in words and not words & {"byte", "bytes"}:
            wrong |= {"offset"}
        if name.startswith("do_"):
            wrong |= {"do_"}
        complaints += [
            f"{source.at(line)} names something {name!r}: not {word!r}" for word in wrong
        ]
    complaints += [
        f"{source.at(node.lineno)} has a field named 'status': say state, verdict or code"
        for group in ast.walk(source.tree)
        if isinstance(group, ast.ClassDef)
        for node in group.body
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "status"
    ]
    return complaints


def named_by_us(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of all that the file names itself: not what others have named."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def paths_of_one_machine(name: str, text: str) -> list[str]:
    """Find absolute paths below a home, work or temporary folder (a bare "/tmp" is a rule's)."""
    pattern = re.compile(r"(?<![\w.~$}/*-])/(?:work|home|root|Users|mnt|tmp|var/tmp)/[\w./-]+")
    return [
        f"{name}:{number} has the path of one machine: {path}"
        for number, line in enumerate(text.splitlines(), 1)
        for path in pattern.findall(line)
    ]


CHECKS: list[Callable[[Source], list[str]]] = [
    sections_out_of_order,
    sections_not_in_the_docstring,
    uses_of_what_stands_below,
    libraries_used_by_others,
    clocks_read_outside_the_host,
    sections_too_long,
    functions_too_long,
    words_we_do_without,
]


# --- batchrun.py passes them ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def source() -> Source:
    return Source((ROOT / "batchrun.py").read_text(encoding="utf-8"))


def refuse(complaints: list[str]) -> None:
    assert not complaints, "\n" + "\n".join(complaints)


def test_the_line_budgets_add_up_to_what_the_file_may_have() -> None:
    assert sum(LINES.values()) < LINES_IN_ALL


def test_the_sections_stand_in_order(source: Source) -> None:
    refuse(sections_out_of_order(source))


def test_the_module_docstring_names_each_section(source: Source) -> None:
    refuse(sections_not_in_the_docstring(source))


def test_each_section_uses_only_what_stands_above_it(source: Source) -> None:
    refuse(uses_of_what_stands_below(source))


def test_each_library_is_used_only_by_its_owner(source: Source) -> None:
    refuse(libraries_used_by_others(source))


def test_only_the_host_reads_clocks(source: Source) -> None:
    refuse(clocks_read_outside_the_host(source))


def test_no_section_is_longer_than_its_budget(source: Source) -> None:
    refuse(sections_too_long(source))


def test_every_function_fits_a_screen(source: Source) -> None:
    refuse(functions_too_long(source))


def test_no_name_uses_a_word_we_do_without(source: Source) -> None:
    refuse(words_we_do_without(source))


def test_no_shipped_file_knows_the_path_of_one_machine() -> None:
    shipped = ["batchrun.py", "README.md", "sample_config.toml", "pyproject.toml"]
    paths = [ROOT / name for name in shipped] + sorted((ROOT / "jobs").glob("*.py"))
    for path in paths:
        text = path.read_text(encoding="utf-8")
        refuse(paths_of_one_machine(str(path.relative_to(ROOT)), text))


# --- and each check can fail ----------------------------------------------------------------------


def made_up(*, header: str = "", **bodies: str) -> Source:
    """Return a source with all sections, empty but for the bodies given by name (`Host="..."`)."""
    parts = [f'"""{", ".join(LINES)}."""\n{header}\n']
    for number, name in enumerate(LINES, 1):
        rule = "# " + "=" * 86
        body = bodies.pop(name.replace(" ", "_"), "")
        parts.append(f"{rule}\n# {number}. {name}: what it is for\n{rule}\n{body}\n")
    assert not bodies, f"no such section: {bodies}"
    return Source("".join(parts), name="made_up.py")


LONG = "def walk():\n" + "    pass\n" * 39


@pytest.mark.parametrize("check", CHECKS)
def test_a_made_up_source_without_faults_passes(check: Callable[[Source], list[str]]) -> None:
    assert check(made_up(Host="import psutil\ndef now(): return psutil.boot_time()")) == []


@pytest.mark.parametrize(
    ("check", "source", "complaint"),
    [
        (
            sections_out_of_order,
            Source("# " + "=" * 86 + "\n# 1. Host: what for\n# " + "=" * 86),
            "sections are ['1. Host']",
        ),
        (
            sections_not_in_the_docstring,
            Source('"""Vocabulary, Host, and no more."""'),
            "does not name 'Ledger'",
        ),
        (
            uses_of_what_stands_below,
            made_up(Host="def ask():\n    return Ledger()", Ledger="class Ledger: pass"),
            "made_up.py:11 (2. Host) uses Ledger, defined at made_up.py:23 (5. Ledger)",
        ),
        (
            uses_of_what_stands_below,
            made_up(Host="def ask(of: 'list[Ledger]'): ...", Ledger="class Ledger: pass"),
            "(2. Host) uses Ledger",
        ),
        (
            uses_of_what_stands_below,
            made_up(
                Host="class A:\n    repair = 1\n    def b(self):\n        return repair()",
                Recovery="def repair(): ...",
            ),
            "(2. Host) uses repair",
        ),
        (
            uses_of_what_stands_below,
            made_up(Host="def ask():\n    global ENDED\n    ENDED = 1", Jobs="ENDED = 0"),
            "(2. Host) uses ENDED",
        ),
        (
            libraries_used_by_others,
            made_up(
                header="import apsw as a",
                Reports="def rows():\n    return a.Connection(':memory:')",
            ),
            "(13. Reports) uses apsw, which belongs to ['Health', 'Jobs', 'Ledger']",
        ),
        (
            libraries_used_by_others,
            made_up(Worker="def rows():\n    from filelock import UnixFileLock"),
            "(11. Worker) uses filelock, which belongs to ['Locks and maintenance']",
        ),
        (
            libraries_used_by_others,
            made_up(Jobs="import pickle"),
            "(8. Jobs) uses pickle, which belongs to nobody",
        ),
        (
            libraries_used_by_others,
            made_up(header="import time", Health="def age():\n    return time.monotonic()"),
            "(7. Health) uses time, which belongs to ['Host']",
        ),
        (
            clocks_read_outside_the_host,
            made_up(
                header="import datetime", Health="def a():\n    return datetime.datetime.now()"
            ),
            "(7. Health) reads a clock: datetime.datetime.now",
        ),
        (
            sections_too_long,
            made_up(Operations="\n" * LINES["Operations"]),
            f"(9. Operations) has {LINES['Operations'] + 4} lines, {LINES['Operations']} at most",
        ),
        (
            sections_too_long,
            Source("\n" * LINES_IN_ALL),
            f"has {LINES_IN_ALL} lines, should be under {LINES_IN_ALL}",
        ),
        (functions_too_long, made_up(Jobs=LONG), "(8. Jobs) walk has 40 lines of code, 39 at most"),
        (
            functions_too_long,
            made_up(Command_line="@cli.command()\ndef run():\n" + "    pass\n" * 25),
            "(14. Command line) run has 26 lines of code, 25 at most",
        ),
        (
            words_we_do_without,
            made_up(Jobs="class BatchManager: pass"),
            "'BatchManager': not 'manager'",
        ),
        (words_we_do_without, made_up(Jobs="def a(chunk_size): pass"), "'chunk_size': not 'chunk'"),
        (words_we_do_without, made_up(Jobs="def do_it(): pass"), "'do_it': not 'do_'"),
        (words_we_do_without, made_up(Jobs="offset = 1"), "'offset': not 'offset'"),
        (words_we_do_without, made_up(Jobs="class A:\n    status: str"), "a field named 'status'"),
    ],
)
def test_a_made_up_fault_is_found_and_named(
    check: Callable[[Source], list[str]], source: Source, complaint: str
) -> None:
    complaints = check(source)
    assert any(complaint in found for found in complaints), complaints


@pytest.mark.parametrize(
    "body",
    [
        "def ask(repair): return repair",
        "def ask():\n    repair = 1\n    return [repair for _ in ()]",
        "def ask(): return [repair for repair in ()]",
        "def ask():\n    def inner(): return repair\n    repair = 1",
        "def ask(word: Literal['repair']): ...",
        "class A:\n    def repair(self): ...\n    again = repair",
        "ask = lambda repair: repair",
        "def ask(of):\n    match of:\n        case {'a': repair}: return repair",
        "def ask(of): return of.repair",
    ],
)
def test_a_local_name_is_not_taken_for_one_defined_below(body: str) -> None:
    assert uses_of_what_stands_below(made_up(Host=body, Recovery="def repair(): ...")) == []


def test_a_docstring_does_not_count_as_lines_of_a_function() -> None:
    documented = LONG.replace("    pass\n", '    """Once.\n\n    Twice.\n    """\n', 1)
    assert functions_too_long(made_up(Jobs=documented)) == []


def test_what_others_have_named_is_not_our_word() -> None:
    body = "def tell(log, byte_offset):\n    log.info(log.handlers, is_flag=byte_offset)"
    assert words_we_do_without(made_up(Jobs=body)) == []


@pytest.mark.parametrize("path", ["/home/ada/shop", "/mnt/ada/x.py", "/tmp/shop/v", "/root/.cache"])  # noqa: S108 - looked for
def test_a_path_of_one_machine_is_found(path: str) -> None:
    assert paths_of_one_machine("made_up.py", f"\nFEED = '{path}'") == [
        f"made_up.py:2 has the path of one machine: {path}"
    ]


@pytest.mark.parametrize(
    "text", ['"/tmp"', "under /tmp, /var/tmp", "/srv/shop", "jobs/home/x", "~/home/x"]
)
def test_a_rule_about_folders_is_no_path_of_one_machine(text: str) -> None:
    assert paths_of_one_machine("made_up.py", text) == []
