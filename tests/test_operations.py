"""What docs/operations-reference.md says of backups, restores and capacity.

tests/test_pages.py runs the page's drills for SQLite and PostgreSQL.  MariaDB's is run here, since
its programs are not on every machine, and so is what the page says without a command.
"""

import asyncio
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.adk.events import Event, EventActions

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService, Reason, TamperedError
from adk_secure_sessions.maintenance import (
    Database,
    Verification,
    rotate_master,
    rotate_root,
    verify,
)
from tests.benchmarks.report import RESULTS
from tests.benchmarks.results import Results
from tests.servers import MariaDB, unavailable
from tests.sqlite_files import execute

PAGE = (Path(__file__).parent.parent / "docs" / "operations-reference.md").read_text("utf-8")
KEY = bytes(32)
IDS: dict[str, Any] = {"app_name": "clinic", "user_id": "ada", "session_id": "first"}


async def append(service: EncryptedSessionService, **ids: Any) -> None:
    """Append an event to a session, which is created if it does not exist."""
    ids = IDS | ids
    session = await service.get_session(**ids) or await service.create_session(**ids)
    await service.append_event(session, Event(author="user", invocation_id="i"))


async def fill(db_url: str, key_db_url: str | None = None, **ids: Any) -> None:
    async with EncryptedSessionService(
        db_url, AesGcmBackend(KEY), key_db_url=key_db_url
    ) as service:
        await append(service, **ids)


async def verified(db_url: str, key_db_url: str | None = None) -> Verification:
    async with Database(db_url, AesGcmBackend(KEY), key_db_url=key_db_url) as db:
        return await verify(db)


def vacuumed(source: Path, target: Path) -> Path:
    execute(source, "VACUUM INTO ?", [str(target)])
    return target


def replace_by(source: Path, path: Path) -> None:
    """Give *path* the contents of *source*."""
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(path)) as new:
        old.backup(new)


# --- backups -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["VACUUM INTO", ".backup"])
async def test_backup_made_while_a_service_writes_is_intact(tmp_path: Path, how: str) -> None:
    source, target = tmp_path / "sessions.db", tmp_path / "backup.db"
    async with EncryptedSessionService(f"sqlite:///{source}", AesGcmBackend(KEY)) as service:
        await append(service)

        async def write() -> None:
            for _ in range(20):
                await append(service)

        copy: Callable[[Path, Path], object] = vacuumed if how == "VACUUM INTO" else replace_by
        await asyncio.gather(write(), asyncio.to_thread(copy, source, target))
    found = await verified(f"sqlite:///{target}")
    assert found.bad == found.unchecked == 0
    assert found.sessions == 1


async def test_key_database_must_not_be_older_than_the_data(tmp_path: Path) -> None:
    data, keys = tmp_path / "data.db", tmp_path / "keys.db"
    await fill(f"sqlite:///{data}", f"sqlite:///{keys}")
    older = {path: vacuumed(path, path.with_suffix(".old")) for path in (data, keys)}
    await fill(f"sqlite:///{data}", f"sqlite:///{keys}", user_id="bob")

    newer_keys = await verified(f"sqlite:///{older[data]}", f"sqlite:///{keys}")
    assert newer_keys.bad == 0
    older_keys = await verified(f"sqlite:///{data}", f"sqlite:///{older[keys]}")
    assert [one.reason for one in older_keys.problems] == [Reason.UNKNOWN_KEY]
    assert re.search("its data key .* is not known", older_keys.problems[0].detail)


@pytest.mark.soak
async def test_drill_for_mariadb(mariadb: MariaDB, tmp_path: Path) -> None:
    for program in ("mariadb-dump", "mariadb-admin", "mariadb"):
        if shutil.which(program) is None:
            unavailable(f"no {program} here: on Debian, apt-get install mariadb-client")
    with mariadb.database() as url:
        source = url.set(drivername="mariadb+asyncmy").render_as_string(hide_password=False)
        await fill(source)
        assert url.database is not None
        restored = f"{url.database}_restored"
        section = PAGE.split("### MySQL and MariaDB")[1].split("###")[0]
        commands = re.findall(r"^\| (?:back up|restore) \| `([^`]+)` \|$", section, re.MULTILINE)
        assert len(commands) == 3
        options = ["--defaults-extra-file=options"]
        client = {
            "host": url.host,
            "port": url.port,
            "user": url.username,
            "password": url.password,
            "socket": url.query.get("unix_socket"),
        }
        lines = [f"{name}={value}\n" for name, value in client.items() if value is not None]
        (tmp_path / "options").write_text("[client]\n" + "".join(lines))
        try:
            for command in commands:
                program, *arguments = shlex.split(
                    re.sub(r"\bclinic\b(?!\.)", url.database, command).replace(
                        "clinic_restored", restored
                    )
                )
                subprocess.run(
                    [program, *options, *arguments],
                    cwd=tmp_path,
                    env={**os.environ},
                    check=True,
                    capture_output=True,
                )
            await fill(source, session_id="second")
            target = url.set(drivername="mariadb+asyncmy", database=restored)
            found = await verified(target.render_as_string(hide_password=False))
            assert found.bad == found.unchecked == 0
            assert found.sessions == found.events == 1
        finally:
            with mariadb.admin.connect() as connection:
                connection.exec_driver_sql(f"DROP DATABASE IF EXISTS {restored}")


# --- failover ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["word", "user:word"])
async def test_row_that_a_failover_or_restore_has_lost_is_rejected_until_the_service_is_restarted(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "sessions.db"
    url, backend = f"sqlite:///{path}", AesGcmBackend(KEY)
    async with EncryptedSessionService(url, backend) as service:
        session = await service.create_session(**IDS)
        await service.create_session(app_name="clinic", user_id="bob", session_id="other")
        standby = vacuumed(path, tmp_path / "standby.db")
        delta = EventActions(state_delta={name: "lost"})
        await service.append_event(session, Event(author="user", actions=delta))
        replace_by(standby, path)
        with pytest.raises(TamperedError, match="restored from a backup, restart the service"):
            await service.get_session(**IDS)
        with pytest.raises(TamperedError, match="restart the service"):
            await service.list_sessions(app_name="clinic", user_id="ada")
        create = service.create_session(app_name="clinic", user_id="ada")
        if name == "user:word":
            with pytest.raises(TamperedError, match="restart the service"):
                await create
        else:
            await create
        assert await service.get_session(app_name="clinic", user_id="bob", session_id="other")
    async with EncryptedSessionService(url, backend) as restarted:
        await append(restarted)
    assert (await verified(url)).bad == 0


# --- escrow --------------------------------------------------------------------------------------


async def test_saved_keyring_in_escrow_outlives_rotate_root_but_not_rotate_master(
    tmp_path: Path,
) -> None:
    path = tmp_path / "sessions.db"
    url, root, offline, new = f"sqlite:///{path}", KEY, bytes([1] * 32), bytes([2] * 32)
    await fill(url)

    async def rotate(rotation: Any, db_url: str, key: bytes, *also: bytes) -> None:
        old = [AesGcmBackend(one) for one in also]
        async with Database(db_url, AesGcmBackend(key), additional_backends=old) as db:
            await rotation(db)

    escrow = vacuumed(path, tmp_path / "escrow.db")
    await rotate(rotate_root, f"sqlite:///{escrow}", offline, root)

    async def opened_with_escrow(name: str) -> Verification:
        restored = vacuumed(path, tmp_path / name)
        with closing(sqlite3.connect(restored)) as connection:
            connection.execute("ATTACH ? AS escrow", [str(escrow)])
            connection.execute("DELETE FROM secure_keyring")
            connection.execute("INSERT INTO secure_keyring SELECT * FROM escrow.secure_keyring")
            connection.commit()
        async with Database(f"sqlite:///{restored}", AesGcmBackend(offline)) as db:
            return await verify(db)

    await rotate(rotate_root, url, new, root)
    found = await opened_with_escrow("after-root.db")
    assert (found.bad, found.sessions) == (0, 1)
    await rotate(rotate_master, url, new)
    found = await opened_with_escrow("after-master.db")
    assert found.bad > 0
    assert found.sessions == 0


# --- capacity ------------------------------------------------------------------------------------


def test_planned_sizes_are_not_below_the_measured_ones() -> None:
    """The rules of the page's table, for the sizes that the benchmarks have measured."""
    assert "| an event | the length of its JSON, plus 300 |" in PAGE
    assert "| 1.1 times the length of the JSON of its state, plus 700 |" in PAGE
    figures = Results.load(RESULTS).figures
    checked = 0
    for name, figure in figures.items():
        found = re.fullmatch(r"(\w+)/stored/(event|session, .*)/(aesgcm|fernet)", name)
        if found is None:
            continue
        json = figures[f"{found[1]}/stored/{found[2]}/JSON"].value
        planned = json + 300 if found[2] == "event" else 1.1 * json + 700
        assert figure.value <= planned, name
        checked += 1
    assert checked >= 20
