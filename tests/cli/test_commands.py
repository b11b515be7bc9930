"""Each command, on each kind of database: what it prints, and its exit status."""

import asyncio
import base64
import io
import itertools
import os
import re
import stat
import time
from pathlib import Path

import click
import pytest
import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend
from adk_secure_sessions.cli import output
from tests.cli.support import commands, on, run
from tests.maintenance.support import NEW, OLD, fill, query, run_sql

# --- all of them ---------------------------------------------------------------------------------


@pytest.mark.no_tables
def test_every_command_works_on_a_database_from_init_to_purge(url: str, place: sa.URL) -> None:
    made = run("init", *on(url), "--json")
    assert made.code == 0
    assert len(made.json["tables"]) == 9
    again = run("init", *on(url))
    assert (again.code, again.stdout) == (0, "created: 0 tables, 0 master keys\n")
    asyncio.run(fill(url))
    told = run("status", *on(url, None))
    assert told.code == 0
    assert "secure_events" in told.stdout
    assert "12 under current key" in told.stdout
    assert "unwrapped" not in told.stdout
    assert "unwrapped" in run("status", *on(url)).stdout
    wrong = run("status", *on(url, "env:NEW_KEY"))
    assert (wrong.code, "cannot be unwrapped" in wrong.stdout) == (1, True)
    checked = run("verify", *on(url))
    assert checked == (
        0,
        "decrypted: 1 app, 2 users, 4 sessions, 12 events\nall rows are intact\n",
        "",
    )
    rotated = run("rotate", "root", *on(url, "env:NEW_KEY"), "--also-key", "env:OLD_KEY", "--json")
    assert (rotated.code, len(rotated.json["rotated_ids"])) == (0, 2)
    rejected = run("verify", *on(url))
    assert (rejected.code, rejected.stdout) == (2, "")
    assert rejected.stderr.count("\n") == 1
    assert AesGcmBackend(NEW).root_key.key_id in rejected.stderr
    lookup = ["debug", "lookup", "--app", "clinic", "--user", "bob", "--session", "s1"]
    found = run(*lookup, *on(url, "env:NEW_KEY"))
    assert (found.code, found.stdout.count("  row ")) == (0, 3)
    shown = run("debug", "inspect", "secure_events", "--db", url, "--limit", "2", "--json")
    assert [one["backend_id"] for one in shown.json["rows"]] == ["1", "1"]
    would = run("purge", "sessions", *on(url, "env:NEW_KEY"), "--older-than", "999999w")
    # The C library of the system decides how many digits a year has.
    assert re.search(r"have expired or were last used before 0*1-01-01 00:00 UTC\n$", would.stdout)
    would = run("purge", "sessions", *on(url, "env:NEW_KEY"), "--older-than", "90d", "--dry-run")
    assert (would.code, would.stderr) == (0, "")
    assert re.fullmatch(
        "would be deleted: 4 sessions\nsuch sessions .* were last used before .* UTC\n",
        would.stdout,
    )
    run("purge", "sessions", *on(url, "env:NEW_KEY"), "--older-than", "90d")
    assert query(place, "SELECT count(*) FROM secure_sessions") == [(0,)]


def test_verify_exits_with_1_and_names_the_row(filled: str, place: sa.URL) -> None:
    ((row,),) = query(place, "SELECT min(session_row) FROM secure_events")
    assert run_sql(place, "DELETE FROM secure_events WHERE session_row = :row AND seq = 1", row=row)
    said = run("verify", *on(filled))
    assert said.code == 1
    assert said.stdout.startswith(
        f"secure_events row {row}: events 0 to 2 of this session are expected"
    )
    assert "bad: 1 row\n" in said.stdout
    as_json = run("verify", *on(filled), "--json")
    assert (as_json.code, as_json.json["rows"]["bad"]) == (1, 1)
    assert as_json.json["rows"]["problems"][0]["row"] == str(row)
    purged = run("purge", "sessions", *on(filled), "--older-than", "1s")
    assert purged.code == 0  # a session is deleted though its history has a gap


def test_backends_are_named(file_url: str) -> None:
    assert run("init", *on(file_url), "--backend", "fernet").code == 0
    asyncio.run(fill(file_url))  # by AES-256-GCM
    assert run("verify", *on(file_url)).code == 0
    other = run("verify", *on(file_url), "--backend", "fernet")
    text = (
        "encrypted by backend aesgcm, which is not listed: list it in additional_backends (--also-"
    )
    assert (other.code, text in other.stdout) == (1, True)
    other = run("retire", *on(file_url), "--backend", "fernet")
    assert (other.code, text in other.stderr, "delete" in other.stderr) == (2, True, False)
    both = run("verify", *on(file_url), "--backend", "fernet", "--also-backend", "aesgcm")
    assert both.code == 0


def test_plaintext_database_needs_no_key(file_url: str) -> None:
    assert run("init", "--db", file_url, "--backend", "no-op").code == 0
    assert run("verify", "--db", file_url, "--backend", "no-op").code == 0
    refused = run("verify", *on(file_url))
    assert (refused.code, "plaintext by NoOpBackend" in refused.stderr) == (2, True)
    assert run("verify", *on(file_url), "--backend", "no-op").code == 0


# --- keygen --------------------------------------------------------------------------------------


def test_keygen_prints_a_key() -> None:
    said = run("keygen")
    assert len(base64.urlsafe_b64decode(said.stdout)) == 32
    assert said.stdout != run("keygen").stdout


def test_keygen_writes_a_file_that_nobody_else_may_read(tmp_path: Path) -> None:
    path = tmp_path / "root.key"
    said = run("keygen", "--output", str(path))
    assert said.code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = path.read_text()
    assert key.strip() not in said.stdout
    again = run("keygen", "--output", str(path))
    assert (again.code, path.read_text()) == (2, key)
    assert "is not overwritten" in again.stderr
    assert AesGcmBackend(f"file:{path}").root_key.key_id in said.stdout
    nowhere = run("keygen", "--output", str(tmp_path / "no" / "root.key"))
    assert (nowhere.code, nowhere.stderr.count("\n")) == (2, 1)


def test_keygen_syncs_the_file_and_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bytes]] = []
    sync = os.fsync

    def recorded(file: int) -> None:
        name = os.readlink(f"/proc/self/fd/{file}")
        is_directory = stat.S_ISDIR(os.fstat(file).st_mode)
        synced.append((name, b"" if is_directory else Path(name).read_bytes()))
        sync(file)

    monkeypatch.setattr(os, "fsync", recorded)
    path = tmp_path / "root.key"
    assert run("keygen", "--output", str(path)).code == 0
    assert synced == [(str(path), path.read_bytes()), (str(tmp_path), b"")]


def test_keygen_succeeds_in_a_directory_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def open_file(path: Path, flags: int, *mode: int, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECTORY:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_file)
    assert run("keygen", "--output", str(tmp_path / "root.key")).code == 0


def test_keygen_leaves_no_key_that_may_be_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    said = run("keygen", "--output", str(tmp_path / "root.key"))
    assert (said.code, "No space left on device" in said.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


# --- wrong use -----------------------------------------------------------------------------------

WRONG: dict[str, tuple[list[str], str]] = {
    "no database": (["status"], "Missing option '--db'"),
    "no key": (["verify", "--db", "sqlite:///x.db"], "give --key"),
    "a key itself": (
        ["verify", "--db", "sqlite:///x.db", "--key", base64.b64encode(OLD).decode()],
        "never the key itself",
    ),
    "another scheme": (
        ["verify", "--db", "sqlite:///x.db", "--key", "7Qx:secret"],
        "not a key spec that this version knows",
    ),
    "no such variable": (["verify", "--db", "sqlite:///x.db", "--key", "env:NONE"], "'NONE'"),
    "no such file": (["verify", "--db", "sqlite:///x.db", "--key", "env:OLD_KEY"], "'x.db'"),
    "no URL": (["status", "--db", "7Qx"], "not a database URL"),
    "no path": (["init", *on("sqlite:///")], "in memory"),
    "no server": (
        ["status", "--db", "postgresql+asyncpg://u:7Qx@127.0.0.1:1/d"],
        "",
    ),
    "no speed": (["status", *on("x"), "--rows-per-second", "nan"], "'nan' is not a valid number"),
    "no age": (["purge", "sessions", *on("sqlite:///x.db"), "--older-than", "90"], "90d"),
    "no table": (
        ["debug", "inspect", "secure_meta", "--db", "sqlite:///x.db"],
        "choose one of secure_",
    ),
    "no row": (
        ["debug", "inspect", "secure_users", "--db", "sqlite:///x.db", "--row", "x"],
        "'x.db'",
    ),
    "no backend": (["verify", *on("sqlite:///x.db"), "--backend", "rot13"], "rot13"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_exits_with_2_and_says_what_to_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, text = WRONG[name]
    said = run(*arguments)
    assert (said.code, said.stdout) == (2, "")
    assert text in said.stderr
    assert "Traceback" not in said.stderr
    assert "7Qx" not in said.stderr
    assert base64.b64encode(OLD).decode() not in said.stderr
    assert list(tmp_path.iterdir()) == []


# --- progress ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_a_bar_with_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(output, "BAR_EVERY", 0.0)
    with output.progress("verify") as report:
        for done in range(0, 101, 25):
            report(done, 100)
            time.sleep(0.35)  # after a second it knows how long the rest will take
    shown = terminal.getvalue()
    assert "verify" in shown
    assert "100/100" in shown
    assert "rows/s" in shown
    assert "00:00:0" in shown


def test_progress_that_begins_again_is_shown_with_its_own_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`separate` counts its rows several times."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with output.progress("separate") as report:
        for processed in (500, 1000, 10, 20):
            report(processed, 1000)
    shown = re.findall(r"(\d+)/1000  ([\d,]+) rows/s", terminal.getvalue())
    assert shown == [("500", "500"), ("1000", "500"), ("10", "10"), ("20", "10")]


def test_progress_elsewhere_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "LINE_EVERY", 0.0)
    with output.progress("verify") as report:
        report(1, 2000)
    assert re.fullmatch(r"verify: 1 of 2,000 rows, [\d,]+ rows/s\n", capsys.readouterr().err)


@pytest.mark.parametrize("name", commands())
def test_option_that_is_given_twice_is_a_usage_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last value alone, the command would do a part of what was asked, and exit 0."""
    monkeypatch.chdir(tmp_path)
    single = [
        one.opts[0]
        for one in commands()[name].params
        if isinstance(one, click.Option) and not (one.multiple or one.is_flag)
    ]
    assert single
    for option in single:
        said = run(*name.split(), option, "1", f"{option}=2")
        assert (said.code, f"{option} is given more than once" in said.stderr) == (2, True)
