"""Runs what a page shows, block after block, as somebody would who follows it in a new directory.

A page is the README or a file of docs/.  Sybil finds the blocks; what each language means is here:

- `python` runs in the page's one namespace; with `title="name.py"` it is saved there instead;
- `sh` runs in a shell, and what it exports holds from then on; `python`, `uvicorn` and our own
  command run in this process, since importing google-adk takes seconds, unless the shell is to
  tell how they end; `make`, `pip` and `pytest`: below;
- `sql` runs on PostgreSQL, as its superuser;
- `text` is what the block before it printed: `...` stands for what differs from run to run.

A comment `<!--- invisible-code: python` holds code that readers are spared.
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
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from sybil import Document, Example, Region
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer

from adk_secure_sessions.cli import main
from tests.servers import PostgreSQL

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

_INFO = re.compile(r'(?P<language>[\w-]*)(?: title="(?P<title>[\w.]+)")?[ \t]*\n')
_LEXERS = (
    RawFencedCodeBlockLexer(_INFO),
    DirectiveInHTMLCommentLexer(
        "invisible-code", r"\w+", {"arguments": "language", "source": "source"}
    ),
)
_ADDRESS = "127.0.0.1:8000"  # where pages have uvicorn listen; here it is wherever is free
_PATIENCE = 60.0  # seconds


def blocks(path: Path) -> Document:
    """The page, with a region for each of its blocks of code, whatever the language."""

    def parse(document: Document) -> Iterable[Region]:
        for lexer in _LEXERS:
            for region in lexer(document):
                yield Region(region.start, region.end, region.lexemes, _run)

    return Document.parse(str(path), parse)


def run(path: Path, page: "Page") -> None:
    document = blocks(path)
    document.namespace["_page"] = page
    for example in document.examples():
        try:
            example.evaluate()
        except BaseException as error:
            error.add_note(f"in the block at {path.name}:{example.line}")
            raise


def language(region: Region) -> str:
    return str(region.parsed["language"])


def _run(example: Example) -> None:
    page: Page = example.namespace["_page"]
    block: Mapping[str, Any] = example.parsed
    RUNNERS[block["language"]](page, str(block["source"]), block.get("title"))


class Page:
    """One reader's directory, names, environment and servers."""

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
        self._made = set(expected)
        self._printed: str | None = None
        self._moved: dict[str, str] = {}
        # For hidden blocks: what is entered ends with the page, what has moved is shown otherwise.
        self.names |= {"enter": stack.enter_context, "moved": self._moved}
        self.names["setenv"] = monkeypatch.setenv
        monkeypatch.chdir(directory)
        monkeypatch.syspath_prepend(str(directory))
        # The reader's `python` is this one; and nothing of this machine's answers for a page.
        scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        monkeypatch.setenv("PATH", scripts)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for name in ("GOOGLE_API_KEY", "GEMINI_API_KEY", "PYTEST_ADDOPTS"):
            monkeypatch.delenv(name, raising=False)
        stack.callback(self._forget_modules)

    # --- what the languages do -------------------------------------------------------------------

    def python(self, source: str, title: str | None) -> None:
        for shown, real in self._moved.items():
            source = source.replace(shown, real)
        if title:
            (self.directory / title).write_text(source, encoding="utf-8")
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

    def text(self, source: str, title: str | None) -> None:
        assert title is None
        if source in self._made:
            return
        assert self._printed is not None, "text that no block before it printed"
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

    # --- what the commands do --------------------------------------------------------------------

    def _make(self, command: list[str], line: str) -> None:
        """CI runs them itself: here, that they are there."""
        arguments = [word for word in command[1:] if "=" not in word]
        assert arguments, f"{line!r} names no target"
        subprocess.run(["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True)

    def _pip(self, command: list[str], line: str) -> None:
        """Nothing is installed; but what is named is ours, with extras that exist, or required."""
        assert command[:2] == ["pip", "install"], line
        extras_there = PROJECT["optional-dependencies"]
        required = "\n".join(itertools.chain(PROJECT["dependencies"], *extras_there.values()))
        for name in command[2:]:
            package, _, extras = name.rstrip("]").partition("[")
            if package in (".", PROJECT["name"]):
                assert set(filter(None, extras.split(","))) <= set(extras_there)
            else:
                assert re.search(rf"^{re.escape(name)}\b", required, re.MULTILINE), line

    def _pytest(self, command: list[str], line: str) -> None:
        """In the repository: that the arguments are valid, and select something."""
        arguments = [word for word in command[1:] if word != "pytest"]
        if not any(word.startswith("tests/") for word in arguments):
            self._shell(command, line)
            return
        # In this process: all that it imports is here already.
        with contextlib.chdir(ROOT):
            code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *arguments])
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
        listener = socket.create_server(("127.0.0.1", 0))
        self._moved[_ADDRESS] = f"127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, ws="none", log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()

        def stop() -> None:
            server.should_exit = True
            thread.join(_PATIENCE)
            listener.close()

        self._stack.callback(stop)
        deadline = time.monotonic() + _PATIENCE
        while not server.started:
            assert thread.is_alive(), f"{line!r} ended at once"
            assert time.monotonic() < deadline, f"{line!r} does not answer"
            time.sleep(0.01)

    def _own(self, command: list[str], line: str) -> None:
        if "||" in command:
            self._shell(command, line)
            return
        status: object = 0
        try:
            main(command[1:], prog_name=command[0])
        except SystemExit as end:
            status = end.code
        assert not status, f"{line!r} ends with {status}"

    def _shell(self, command: list[str], line: str) -> None:
        """Run *line*, and take over what it leaves in the environment."""
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
        """What was imported from the directory, so that the next import reads the file anew."""
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
}
_COMMANDS: dict[str, Callable[[Page, list[str], str], None]] = {
    "adk-secure-sessions": Page._own,
    "make": Page._make,
    "pip": Page._pip,
    "pytest": Page._pytest,
    "python": Page._python,
    "uvicorn": Page._uvicorn,
}
