"""How commands start, ask and end: start-up, Ctrl-C, questions on a terminal, read-only use."""

import asyncio
import json
import os
import pty
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions.cli import database_commands, program, rotate
from adk_secure_sessions.errors import Reason
from adk_secure_sessions.maintenance import (
    DataKeyCount,
    IndexChange,
    IndexStatus,
    MasterKey,
    MigrationStatus,
    Problem,
    RecordCount,
    SessionPurge,
    Status,
    TrailStatus,
    rotate_data,
    rotate_master,
    separate,
)
from tests.cli.support import Said, begin_trail, on, run
from tests.clocks import shifted
from tests.maintenance.support import fill, interrupt, query

PROGRAM = str(Path(sys.executable).parent / "adk-secure-sessions")

# --- start ---------------------------------------------------------------------------------------


# The libraries that commands on a SQLite database import.  Each other one would cost time.
LIBRARIES = {
    "_cffi_backend",
    "adk_secure_sessions",
    "click",
    "cryptography",
    "greenlet",  # SQLAlchemy 2.0 imports it
    "pydantic_core",
    "sqlalchemy",
    "typing_extensions",
}
SLOW = {
    "sqlalchemy.dialects.mysql",
    "sqlalchemy.dialects.postgresql",
    "sqlalchemy.ext.asyncio",
    "sqlalchemy.orm",
    "urllib.request",
}


def imported(*given: list[str]) -> list[set[str]]:
    """Run the given in one process; return the modules that it has imported after each."""
    code = (
        "import json, sys; before = set(sys.modules); from adk_secure_sessions.cli import main\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    try: main(command)\n"
        "    except SystemExit as end: assert end.code == 0, command\n"
        "    print('IMPORTED', *(sys.modules.keys() - before), file=sys.stderr)"
    )
    arguments = [sys.executable, "-c", code, json.dumps(given)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    words = [line.split() for line in done.stderr.splitlines()]
    return [set(names) for first, *names in words if first == "IMPORTED"]


def libraries(modules: set[str]) -> set[str]:
    """The installed packages among *modules*; those of the standard library are not included."""
    return {name.split(".")[0] for name in modules} & packages_distributions().keys()


def test_help_keygen_and_commands_import_few_libraries(file: str) -> None:
    first = (["--help"], ["-h"], ["verify", "-h"], ["keygen"])
    commands = ([command, *on(file)] for command in ("init", "check", "status", "verify"))
    found = imported(*first, *commands)
    assert libraries(found[3]) <= {"_cffi_backend", "adk_secure_sessions", "click", "cryptography"}
    assert found[-1] & SLOW == set()
    assert libraries(found[-1]) <= LIBRARIES


def test_program_ends_without_looking_for_cycles() -> None:
    code = (
        "import atexit, gc; from adk_secure_sessions.cli import main\n"
        "before = gc.get_freeze_count()  # Python 3.12 begins with some\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > before))\n"
        "main({})"
    )
    for arguments, frozen in (("", "True"), ("['-h']", "False")):
        program = [sys.executable, "-c", code.format(arguments), "-h"]
        done = subprocess.run(program, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == frozen


def test_shell_completes_commands_and_tables() -> None:
    line = {"COMP_WORDS": "adk-secure-sessions debug inspect secure_e", "COMP_CWORD": "3"}
    environment = {**os.environ, "_ADK_SECURE_SESSIONS_COMPLETE": "zsh_complete", **line}
    done = subprocess.run([PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert "secure_events" in done.stdout


# --- check ---------------------------------------------------------------------------------------


def test_check_says_that_a_service_could_start(filled: str) -> None:
    said = run("check", *on(filled))
    assert (said.code, said.stderr) == (0, "")
    assert re.fullmatch(
        r"a service can start: format \d+, root key key:\S+, 2 master keys in this database\n",
        said.stdout,
    )


def test_check_rejects_a_wrong_key_and_names_the_option(file: str) -> None:
    said = run("check", *on(file, "env:NEW_KEY"))
    assert said.code == 2
    assert "--also-key" in said.stderr
    assert run("check", *on(file, "env:NEW_KEY"), "--also-key", "env:OLD_KEY").code == 0


def test_check_rejects_a_database_that_is_empty_and_creates_nothing(
    file_url: str, tmp_path: Path
) -> None:
    said = run("check", *on(file_url))
    assert (said.code, "adk-secure-sessions init" in said.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []
    sqlite3.connect(tmp_path / "sessions.db").close()
    (tmp_path / "sessions.db").touch()
    assert run("check", *on(file_url)).code == 2
    assert (tmp_path / "sessions.db").stat().st_size == 0


def test_check_gives_up_when_nothing_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql+asyncpg://u:secret@127.0.0.1:{silent.getsockname()[1]}/d"
        began = time.monotonic()
        said = run("check", *on(url), "--timeout", "0.5", "--json")
    assert (said.code, "within 0.5 s" in said.stderr) == (2, True)
    assert (said.json["error"], said.json["retryable"]) == ("Timeout", True)
    assert time.monotonic() - began < 10
    assert "secret" not in said.stdout + said.stderr


@pytest.mark.parametrize("held", ["sessions.db", "keys.db"])
def test_check_gives_up_while_another_process_holds_the_file(held: str, tmp_path: Path) -> None:
    data, keys = (f"sqlite:///{tmp_path / name}" for name in ("sessions.db", "keys.db"))
    both = [*on(data), "--key-db", keys]
    assert run("init", *both).code == 0
    with closing(sqlite3.connect(tmp_path / held, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        said = run("check", *both, "--timeout", "0.5")
    assert (said.code, "within 0.5 s" in said.stderr) == (2, True)
    assert time.monotonic() - began < 10


# --- commands that only read ---------------------------------------------------------------------

ONLY_READ = {
    "check": ["--key", "env:OLD_KEY"],
    "status": ["--key", "env:OLD_KEY"],
    "verify": ["--key", "env:OLD_KEY"],
    "debug lookup": ["--key", "env:OLD_KEY", "--app", "clinic", "--user", "ada"],
    "debug inspect": ["secure_events"],
}


def test_commands_that_only_read_leave_the_file_alone_and_need_no_lock(
    file: str, tmp_path: Path
) -> None:
    """While another process holds the only write lock of SQLite, a write would wait and fail."""
    path = tmp_path / "sessions.db"
    before = path.read_bytes()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        for name, options in ONLY_READ.items():
            assert run(*name.split(), "--db", file, *options).code == 0
    assert path.read_bytes() == before


# --- Ctrl-C --------------------------------------------------------------------------------------


def press_ctrl_c(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Said:
    """Run a command that gets SIGINT when it first reports progress."""

    def report(_done: int, _total: int) -> None:
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        for module in (program, rotate, database_commands):
            patch.setattr(module, "progress", lambda *_: nullcontext(report))
        return run(*arguments)


@pytest.mark.parametrize("name", ["rotate data", "rotate master"])
def test_ctrl_c_says_that_it_is_safe_and_how_to_go_on(
    name: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = press_ctrl_c(monkeypatch, *name.split(), *on(file))
    assert said == (
        130,
        "",
        "Error: interrupted, which is safe: each change is complete or undone; to continue, run "
        "the same command again\n",
    )
    restarted = press_ctrl_c(monkeypatch, *name.split(), *on(file), "--restart")
    assert restarted.stderr.endswith(
        "again, without --restart if `status` shows the new rotation\n"
    )
    done = run(*name.split(), *on(file))
    assert (done.code, done.stderr.startswith("continues the rotation begun ")) == (0, True)
    assert run("verify", *on(file)).code == 0


def test_ctrl_c_in_a_command_that_changes_nothing_says_so(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (
        ["verify"],
        ["status"],
        ["purge", "sessions", "--older-than", "1d", "--dry-run"],
    ):
        said = press_ctrl_c(monkeypatch, *arguments, *on(file))
        assert said == (130, "", "Error: interrupted; nothing was changed\n")
    as_json = press_ctrl_c(monkeypatch, "verify", *on(file), "--json")
    assert (as_json.code, as_json.json["error"]) == (130, "Interrupted")


def test_ctrl_c_ends_the_program_with_130(file: str) -> None:
    slowly = ["rotate", "data", *on(file), "--rows-per-second", "2"]
    with subprocess.Popen([PROGRAM, *slowly], stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not query(file, "SELECT 1 FROM secure_meta WHERE name = 'rotation.data'"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, "which is safe" in said) == (130, True)
    assert "Traceback" not in said


# --- a rotation that is continued ----------------------------------------------------------------


def on_terminal(answer: str, *arguments: str) -> tuple[int | None, str, str]:
    """Run the program with a terminal as stdin and stderr; return exit status and both outputs."""
    ours, its = pty.openpty()
    try:
        with subprocess.Popen(
            [PROGRAM, *arguments], stdin=its, stderr=its, stdout=subprocess.PIPE, text=True
        ) as process:
            os.write(ours, f"{answer}\n".encode())
            stdout, _ = process.communicate(timeout=120)
        return process.returncode, stdout, os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(its)


def test_terminal_is_asked_before_a_rotation_is_continued(file: str) -> None:
    asyncio.run(interrupt(file, rotate_data))
    before = query(file, "SELECT id, state FROM secure_sessions")
    code, stdout, shown = on_terminal("n", "rotate", "data", *on(file))
    assert (code, stdout.strip()) == (1, "")
    assert re.search(r"continues the rotation begun .*Continue it\? \[Y/n\]", shown, re.DOTALL)
    assert "nothing was changed; --restart begins a new rotation" in shown
    assert query(file, "SELECT id, state FROM secure_sessions") == before
    code, stdout, shown = on_terminal("n", "rotate", "data", *on(file), "--yes")
    assert (code, "re-encrypted: " in stdout, "Continue it?" in shown) == (0, True, False)


# --- progress of a rotation ----------------------------------------------------------------------


@pytest.mark.parametrize("rotate", [rotate_data, rotate_master])
def test_status_in_the_middle_of_a_rotation_says_how_much_is_done(rotate: Any, file: str) -> None:
    asyncio.run(interrupt(file, rotate))
    (one,) = run("status", *on(file), "--json").json["unfinished"]
    assert 0 < one["done"] < one["total"]
    said = run("status", "--db", file).stdout
    share = f"{100 * one['done'] // one['total']}%, {one['done']} of {one['total']} "
    assert share in said.splitlines()[-1]
    if rotate is rotate_data:
        assert re.search(r"secure_events +aesgcm +12 +0 under keys of the rotation +0%", said)


@pytest.mark.parametrize(
    ("days", "text", "code"),
    [(400, "400 days in the future: a clock", 1), (-3, "3 days old", 0), (0.005, "0 days old", 0)],
)
def test_master_key_from_the_future_is_a_problem(
    days: int, text: str, code: int, file_url: str
) -> None:
    with shifted(days):
        asyncio.run(fill(file_url))
    said = run("status", "--db", file_url)
    assert said.code == code
    assert said.stdout.count(text) == 2  # the data master and the index master


def test_status_of_an_interrupted_separation_names_the_command_that_ends_it(file: str) -> None:
    asyncio.run(interrupt(file, separate))
    said = run("status", *on(file))
    again = "it runs or was stopped; running `separate` again is safe and continues it"
    assert f"unfinished separation, and services reject this copy; {again}\n" in said.stdout
    assert "running the same command" not in said.stdout
    assert run("status", *on(file), "--json").json["is_separating"] is True
    said = run("check", *on(file))
    assert (said.code, "run `adk-secure-sessions separate` again" in said.stderr) == (2, True)


STATUS = Status(
    "1",
    False,
    (MasterKey(1, "data", "key:0", 1, 1.0, None),),
    (DataKeyCount(1, 1, 1),),
    (RecordCount("t", 1, 10, 1),),
    (),
    None,
    None,
    None,
    0,
    False,
)
LINES: dict[str, list[tuple[Any, str]]] = {
    "migration": [
        (MigrationStatus(0, 0, False, None), "0 sessions copied, 0 tombstones; not complete"),
        (MigrationStatus(1204, 1, True, True), "1,204 sessions copied, 1 tombstone; complete"),
        (MigrationStatus(1, 0, True, None), "complete; not verified: that needs --key"),
        (MigrationStatus(1, 0, True, False), "its mark of completion was tampered with"),
    ],
    "audit_trail": [
        (TrailStatus(1204, 3, 0), "1,204 records in 3 chains, the oldest of 1970-01-01 00:00"),
        (TrailStatus(0, 0, None), "0 records in 0 chains"),
    ],
    "state_index": [
        (IndexStatus(2000, 3, 3, 0), "2,000 rows of 3 keys; complete"),
        (IndexStatus(1, 1, 0, 0), "1 row of 1 key; 1 not complete: `index fill` ends it"),
        (IndexStatus(1, 2, None, None), "not verified: that needs --key"),
        (IndexStatus(1, 2, 2, 1), "1 mark tampered with: run `index fill`"),
    ],
}


@pytest.mark.parametrize("field", LINES)
def test_status_tells_of_a_migration_an_audit_trail_and_a_search_index(field: str) -> None:
    begin = {"state_index": "search index"}.get(field, field.replace("_", " "))
    for value, text in LINES[field]:
        lines = replace(STATUS, **{field: value}).lines()
        (line,) = [line for line in lines if line.startswith(f"{begin}: ")]
        assert text in line


def test_lines_of_a_result_come_from_its_declaration() -> None:
    problem = Problem("secure_sessions", "7", Reason.MISMATCH, "its tag was modified")
    assert next(IndexChange(2, 1, 3, 0, 1, (problem,)).lines()) == problem.line
    assert list(IndexChange(2, 1, 3, 0, 1).lines()) == [
        "compared with the search index: 2 sessions, 1 user",
        "written to the search index: 3 rows",
        "deleted from the search index: 0 rows",
        "cannot be decrypted, and not in the search index: 1 session or user row",
        next(iter(IndexChange(bad=1).extra_lines(dry_run=False))),
    ]
    done = SessionPurge(3, 1, 2, (problem,))
    assert not done.succeeded
    assert list(done.lines(dry_run=True))[1] == "would be deleted: 3 sessions"


# --- files and pipes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["keygen", "--output"],
        ["export", "--decrypt", "--jsonl"],
        ["export", "--decrypt", "--to"],
        ["audit", "export", "--output"],
        ["verify", "--heads"],
        ["verify", "--audit-log"],
    ],
    ids=" ".join,
)
def test_path_that_does_not_exist_is_named_with_advice(arguments: list[str], file: str) -> None:
    asyncio.run(begin_trail(file))
    path = "/nowhere/new"
    value = f"sqlite:///{path}" if "--to" in arguments else path
    database = [] if "keygen" in arguments else on(file)
    said = run(*arguments, value, *database)
    advice = "No such file or directory: check the path and permissions"
    assert said == (2, "", f"Error: '{path}' cannot be used: {advice}\n")


def test_heads_without_a_trail_are_rejected_before_the_rows_are_checked(file: str) -> None:
    said = run("verify", "--heads", "/dev/null", *on(file))
    assert (said.code, said.stdout) == (2, "")
    assert "the database has no audit trail" in said.stderr


def test_output_that_is_full_is_reported_in_one_line(file: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [PROGRAM, "verify", *on(file)], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 2
    assert done.stderr.decode() == (
        "Error: the output, or a file, cannot be written: No space left on device\n"
    )


def test_command_of_a_daemon_without_stdin_and_stderr_works(file: str) -> None:
    closing = ["sh", "-c", 'exec "$@" <&- 2>&-', "sh"]
    rotate = [*closing, PROGRAM, "rotate", "data", *on(file)]
    asyncio.run(interrupt(file, rotate_data))
    done = subprocess.run(rotate, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, "re-encrypted: " in done.stdout) == (0, True)


def test_command_whose_reader_has_ended_says_nothing(file: str) -> None:
    asyncio.run(begin_trail(file))
    reader, writer = os.pipe()
    os.close(reader)
    export = [PROGRAM, "audit", "export", *on(file)]
    done = subprocess.run(export, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
