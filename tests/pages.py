"""Runs the code blocks of a page, one after the other, as a reader does in a new directory.

How it works.  Sybil finds the blocks of a page: the README, or one of docs/.  A `Page` is what one
reader has: a directory, a Python namespace, an environment and, if needed, a PostgreSQL server.
`python` runs in the one namespace; with `title="name.py"`, it is saved as that file, as are `yaml`
and `toml`.  `sh` runs in a shell, whose exports last; `python`, `uvicorn` and our own command run
in this process, where google-adk is imported; `make`, `pip`, `pytest` and `adk` are only checked.
`sql` runs on PostgreSQL, as its superuser.  `text` is the expected output of the block before it;
`...` stands for what differs between runs.  A comment `<!--- invisible-code: python` holds code
that readers do not see.  In a block, the line `FILE:NAME` between two lines `--8<--` stands for a
section of a file, as on the site; ruff formats the form in one line as if it were Python.
"""

import contextlib
import doctest
import importlib
import io
import itertools
import os
import re
import runpy
import shlex
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import uvicorn
from sybil import Document, Example, Region
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer

from adk_secure_sessions.cli import main
from tests.servers import PostgreSQL

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
_PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, GROUPS = _PYPROJECT["project"], _PYPROJECT["dependency-groups"]


def public_names(module: ModuleType) -> list[str]:
    """Return the names that a module exports: those in `__all__`, or all without an underscore."""
    names = (n for n, value in vars(module).items() if not isinstance(value, ModuleType))
    return getattr(module, "__all__", [name for name in names if not name.startswith("_")])


_INFO = re.compile(r'(?P<language>[\w-]*)(?: title="(?P<title>[\w./]+)")?[ \t]*\n')
_LEXERS = (
    RawFencedCodeBlockLexer(_INFO),
    DirectiveInHTMLCommentLexer(
        "invisible-code", r"\w+", {"arguments": "language", "source": "source"}
    ),
)
_SECTION = re.compile(r"^--8<--\n(?P<file>[\w./]+):(?P<name>\w+)\n--8<--\n", re.MULTILINE)
_ADDRESS = "127.0.0.1:8000"  # what pages show; here uvicorn listens on a free port
_PATIENCE = 180.0  # seconds: a block may run pytest, which imports google-adk


def name_of(path: Path) -> str:
    """Return the page's path for the id of a test: two folders have files of one name."""
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> Document:
    """Parse a page: a region for each code block, whatever its language."""

    def parse(document: Document) -> Iterable[Region]:
        for lexer in _LEXERS:
            for region in lexer(document):
                lexemes = {**region.lexemes, "source": _included(region.lexemes["source"])}
                yield Region(region.start, region.end, lexemes, _run)

    return Document.parse(str(path), parse)


def _included(source: str) -> str:
    def section(line: re.Match[str]) -> str:
        text = (ROOT / line["file"]).read_text(encoding="utf-8")
        begin, end = (f"# --8<-- [{mark}:{line['name']}]\n" for mark in ("start", "end"))
        return text.split(begin)[1].split(end)[0]

    return _SECTION.sub(section, source)


def run(path: Path, page: "Page") -> None:
    document = blocks(path)
    document.namespace["_page"] = page
    for example in document.examples():
        try:
            example.evaluate()
        except BaseException as error:
            error.add_note(f"in the block at {name_of(path)}:{example.line}")
            raise


def language(region: Region) -> str:
    return str(region.parsed["language"])


def _run(example: Example) -> None:
    page: Page = example.namespace["_page"]
    block: Mapping[str, Any] = example.parsed
    RUNNERS[block["language"]](page, str(block["source"]), block.get("title"))


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an ASGI application with uvicorn; yield its address, such as `127.0.0.1:8000`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, ws="none", log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            deadline = time.monotonic() + _PATIENCE
            while not server.started:
                assert thread.is_alive(), "it ended at once"
                assert time.monotonic() < deadline, "it does not answer"
                time.sleep(0.01)
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(_PATIENCE)


class Page:
    """A reader of one page: directory, namespace, environment and servers."""

    def __init__(
        self,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
        server: Callable[[], PostgreSQL],
        stack: contextlib.ExitStack,
        expected: Iterable[str] = (),
    ) -> None:
        self.directory = directory
        self.names: dict[str, Any] = {"__name__": "__main__", "server": server}
        self._monkeypatch = monkeypatch
        self._server = server
        self._stack = stack
        self._expected = set(expected)
        self._printed: str | None = None
        self._addresses: dict[str, str] = {}
        # For hidden blocks: context managers that end with the page, and addresses that differ from
        # those that the page shows.
        self.names |= {"enter": stack.enter_context, "moved": self._addresses}
        self.names["setenv"] = monkeypatch.setenv
        monkeypatch.chdir(directory)
        monkeypatch.syspath_prepend(str(directory))
        # The reader's `python` is this interpreter; settings of this machine do not reach the page.
        scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        monkeypatch.setenv("PATH", scripts)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for name in ("GOOGLE_API_KEY", "GEMINI_API_KEY", "PYTEST_ADDOPTS"):
            monkeypatch.delenv(name, raising=False)
        stack.callback(self._forget_modules)

    # --- languages -------------------------------------------------------------------------------

    def python(self, source: str, title: str | None) -> None:
        for shown, real in self._addresses.items():
            source = source.replace(shown, real)
        if title:
            self.saved(source, title)
            self._forget_modules()
            return
        code = compile(source, "<block>", "exec")
        with self._output():
            exec(code, self.names)

    def sh(self, source: str, title: str | None) -> None:
        assert title is None
        with self._output():
            for line in source.replace("\\\n", " ").splitlines():
                command = shlex.split(line, comments=True)
                if command:
                    name = next(word for word in command if "=" not in word)
                    _COMMANDS.get(name, Page._shell)(self, command, line)

    def sql(self, source: str, title: str | None) -> None:
        assert title is None
        with self._output(), self._server().admin.connect() as connection:
            for statement in re.findall(r"[^;]+;", source):
                connection.exec_driver_sql(statement)
                if made := re.match(r"\s*CREATE (ROLE|DATABASE) (\w+)", statement):
                    self._stack.callback(self._drop, *made.groups())

    def saved(self, source: str, title: str | None) -> None:
        assert title is not None
        path = self.directory / title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")

    def text(self, source: str, title: str | None) -> None:
        assert title is None
        if source in self._expected:
            return
        assert self._printed is not None, "no block before this text printed anything"
        checker, options = doctest.OutputChecker(), doctest.ELLIPSIS
        difference = checker.output_difference(
            doctest.Example("", source), self._printed, options | doctest.REPORT_NDIFF
        )
        assert checker.check_output(source, self._printed, options), difference
        self._printed = None

    def _drop(self, kind: str, name: str) -> None:
        with self._server().admin.connect() as connection:
            force = " WITH (FORCE)" if kind == "DATABASE" else ""
            connection.exec_driver_sql(f"DROP {kind} {name}{force}")

    @contextlib.contextmanager
    def _output(self) -> Iterator[None]:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            yield
        self._printed = output.getvalue()

    # --- commands --------------------------------------------------------------------------------

    def _make(self, command: list[str], line: str) -> None:
        """Check that the targets exist; CI runs them itself."""
        arguments = [word for word in command[1:] if "=" not in word]
        assert arguments, f"{line!r} names no target"
        subprocess.run(["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True)

    def _pip(self, command: list[str], line: str) -> None:
        """Install nothing; check that each name is `.`, with extras that exist, or required."""
        assert command[:2] == ["pip", "install"], line
        extras_of_ours = PROJECT["optional-dependencies"]
        groups = [[one for one in group if isinstance(one, str)] for group in GROUPS.values()]
        required = "\n".join(
            itertools.chain(PROJECT["dependencies"], *extras_of_ours.values(), *groups)
        )
        for name in command[2:]:
            package, _, extras = name.split("==")[0].rstrip("]").partition("[")
            if package == ".":  # by its name, pip would install another author's package
                assert set(filter(None, extras.split(","))) <= set(extras_of_ours)
            else:
                assert re.search(rf"^{re.escape(package)}\b", required, re.MULTILINE), line

    def _pytest(self, command: list[str], line: str) -> None:
        """Run the page's tests; check that arguments select tests, if these are the repository's.

        In this process, which has imported everything already.
        """
        arguments = ["-p", "no:cacheprovider", "-oasyncio_default_fixture_loop_scope=function"]
        arguments += [word for word in command[1:] if word != "pytest"]
        of_repository = any(word.startswith("tests/") for word in arguments)
        if of_repository:
            arguments += ["--collect-only", "-q"]
        with contextlib.chdir(ROOT if of_repository else self.directory):
            code = pytest.main(arguments)
        assert code == pytest.ExitCode.OK, line

    def _python(self, command: list[str], line: str) -> None:
        if command[1] == "-c":
            self._shell(command, line)
            return
        self._monkeypatch.setattr(sys, "argv", command[1:])
        script = self.directory / command[1]
        if not script.exists():  # of the repository
            script = ROOT / command[1]
        runpy.run_path(str(script), run_name="__main__")

    def _uvicorn(self, command: list[str], line: str) -> None:
        """Serve until the end of the page."""
        (name,) = command[1:]
        module, _, attribute = name.partition(":")
        app = getattr(importlib.import_module(module), attribute)
        self._addresses[_ADDRESS] = self._stack.enter_context(served(app))

    def _own(self, command: list[str], line: str) -> None:
        otherwise: list[str] = []
        if "||" in command:  # `|| echo "exit status $?"`
            at = command.index("||")
            command, otherwise = command[:at], command[at + 2 :]
        if not otherwise and command[1:3] in (["adk", "web"], ["adk", "api_server"]):
            self._adk(command, line)
            return
        status: object = 0
        with contextlib.ExitStack() as stack:
            if "2>&1" in command:
                command.remove("2>&1")
                stack.enter_context(contextlib.redirect_stderr(sys.stdout))
            try:
                main(command[1:], prog_name=command[0])
            except SystemExit as end:
                status = end.code
        assert bool(status) is bool(otherwise), f"{line!r} ends with {status}"
        print(*(word.replace("$?", str(status)) for word in otherwise), end="\n" if status else "")

    def _adk(self, command: list[str], line: str) -> None:
        """Run a server of google-adk until the end of the page."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        with (self.directory / ".log").open("wb") as log:
            process = subprocess.Popen(
                [*command, f"--port={port}"],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

        def stop() -> None:
            process.terminate()
            process.wait(_PATIENCE)

        self._stack.callback(stop)
        deadline = time.monotonic() + _PATIENCE
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, f"{line!r} ended at once"
            assert time.monotonic() < deadline, f"{line!r} does not answer"
            time.sleep(0.05)
        self._addresses[_ADDRESS] = f"127.0.0.1:{port}"

    def _sqlite3(self, command: list[str], line: str) -> None:
        """Run statements; with Python's own SQLite where the program is not installed."""
        if shutil.which("sqlite3"):
            self._shell(command, line)
            return
        _, file, statements = command
        with contextlib.closing(sqlite3.connect(self.directory / file)) as connection:
            connection.executescript(statements)

    def _adks_own(self, command: list[str], line: str) -> None:
        """Check the options; tests/integrations/test_adk_commands.py runs such commands."""
        from google.adk.cli.cli_tools_click import main as adk

        adk.commands[command[1]].make_context(command[1], command[2:])

    def _shell(self, command: list[str], line: str) -> None:
        """Run *line*, and set the variables that it has exported."""
        environment = self.directory / ".environment"
        done = subprocess.run(
            ["sh", "-euc", f'{line}\nenv -0 > "$0"', str(environment)],
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"{line!r}: {done.stdout}{done.stderr}"
        print(done.stdout, end="")
        for pair in environment.read_bytes().decode().split("\0"):
            name, _, value = pair.partition("=")
            if name and name not in ("_", "PWD", "SHLVL") and os.environ.get(name) != value:
                self._monkeypatch.setenv(name, value)
        environment.unlink()

    def _forget_modules(self) -> None:
        """Forget modules of the directory, so that the next import reads their files again."""
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if path and Path(path).parent == self.directory:
                del sys.modules[name]
        importlib.invalidate_caches()


RUNNERS: dict[str, Callable[[Page, str, str | None], None]] = {
    "python": Page.python,
    "sh": Page.sh,
    "sql": Page.sql,
    "text": Page.text,
    "toml": Page.saved,
    "yaml": Page.saved,
}
_COMMANDS: dict[str, Callable[[Page, list[str], str], None]] = {
    "adk": Page._adks_own,
    "adk-secure-sessions": Page._own,
    "make": Page._make,
    "pip": Page._pip,
    "pytest": Page._pytest,
    "python": Page._python,
    "sqlite3": Page._sqlite3,
    "uvicorn": Page._uvicorn,
}
