"""Attacks on the audit trail by somebody who can write to the database.

`verify` reports them, some of them only with logged heads.
"""

import json
import logging
import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from time import time_ns
from typing import Any, NamedTuple
from unittest import mock

import pytest

from adk_secure_sessions import AesGcmBackend, Audit, EncryptedSessionService, SecureSessionError
from adk_secure_sessions.db import protocol
from adk_secure_sessions.maintenance import (
    Database,
    erase_user,
    export_audit,
    purge_audit,
    rotate_data,
    verify,
    verify_audit,
)
from adk_secure_sessions.storage.features.audit_trail import AuditTrail

BACKEND = AesGcmBackend(bytes(range(32)))
IDS: Any = {"app_name": "clinic", "user_id": "ada", "session_id": "s"}
READS = 6  # further records in each chain


class Victim(NamedTuple):
    """A database with two chains, and the audit log of the services that wrote them."""

    path: Path
    log: pytest.LogCaptureFixture

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"

    def run(self, statement: str, **values: object) -> int:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            return connection.execute(statement, values).rowcount

    def rows(self) -> list[tuple[bytes, int, int, bytes]]:
        with closing(sqlite3.connect(self.path)) as connection:
            return connection.execute("SELECT * FROM secure_audit ORDER BY 1, 2").fetchall()

    def put(self, *rows: tuple[object, ...]) -> None:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.executemany("REPLACE INTO secure_audit VALUES (?, ?, ?, ?)", rows)

    async def access(self) -> None:
        """Let a process begin a chain."""
        service = EncryptedSessionService(self.url, BACKEND, audit=Audit("blind", table=True))
        async with service:
            if await service.get_session(**IDS) is None:
                await service.create_session(**IDS)
            for _ in range(READS):
                await service.get_session(**IDS)

    def heads(self) -> list[str]:
        records = [*self.log.get_records("setup"), *self.log.records]
        return [one.getMessage() for one in records]

    async def problems(self, heads: list[str] | None = None) -> list[str]:
        async with Database(self.url, BACKEND) as db:
            found = await verify_audit(db, None if heads is None else {"log": heads})
        return [f"{one.row}: {one.detail}" for one in found.problems]


@pytest.fixture
async def victim(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Victim:
    caplog.set_level(logging.INFO, "adk_secure_sessions.audit")
    victim = Victim(tmp_path / "sessions.db", caplog)
    await victim.access()
    await victim.access()
    assert await victim.problems(victim.heads()) == []
    return victim


class Row(NamedTuple):
    chain: Any
    number: Any
    time: Any
    record: Any


Rows = list[Row]


def edit(rows: Rows, at: int = 3, **values: object) -> None:
    rows[at] = rows[at]._replace(**values)


def add(rows: Rows, like: Row, **values: object) -> None:
    rows.append(like._replace(**values))


def flip(rows: Rows) -> None:
    record = rows[3].record
    edit(rows, record=record[:-1] + bytes([record[-1] ^ 1]))


def swap(rows: Rows) -> None:
    one, two = rows[2:4]
    rows[2:4] = [two._replace(number=one.number), one._replace(number=two.number)]


# What the attacker does with the rows of two chains, and what `verify` says about it.
MODIFIED, TYPE, ROW = (
    "modified or moved",
    "another type",
    "1 rows have a chain or a number of another",
)
CHANGES: dict[str, tuple[Callable[[Rows], object], str]] = {
    "modified": (flip, MODIFIED),
    "another time": (lambda rows: edit(rows, time=rows[3].time + 1), MODIFIED),
    "swapped": (swap, MODIFIED),
    "moved": (lambda rows: edit(rows, -1, time=rows[2].time, record=rows[2].record), MODIFIED),
    "empty": (lambda rows: edit(rows, record=b""), "malformed"),
    "text": (lambda rows: edit(rows, record="text"), TYPE),
    "time as text": (lambda rows: edit(rows, time="text"), TYPE),
    "large": (lambda rows: edit(rows, record=b"\1" + bytes(2**21)), TYPE),
    "inserted": (lambda rows: add(rows, rows[-1], number=rows[-1].number + 1), MODIFIED),
    "made up": (lambda rows: add(rows, Row(os.urandom(16), 0, 0, b"\1" + bytes(100))), MODIFIED),
    "short chain": (lambda rows: add(rows, rows[0], chain=b"\xff", number=0), "16 bytes"),
    "text as chain": (lambda rows: add(rows, rows[0], chain="chain", number=0), ROW),
    "negative number": (lambda rows: add(rows, rows[0], number=-1), ROW),
    "half a number": (lambda rows: add(rows, rows[0], number=2.5), ROW),
    "one removed": (lambda rows: rows.pop(3), "the records 3 to 3 of the chain were removed"),
    "first removed": (lambda rows: rows.pop(0), "the records 0 to 0 of the chain were removed"),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
async def test_changed_trail_is_reported(
    victim: Victim, change: Callable[[Rows], object], expected: str
) -> None:
    rows = [Row(*row) for row in victim.rows()]
    change(rows)
    victim.run("DELETE FROM secure_audit")
    victim.put(*rows)
    found = await victim.problems()
    assert found
    assert any(expected in one for one in found)
    # The rest is still exported, and nothing that is not authentic.
    lines: list[bytes] = []
    async with Database(victim.url, BACKEND) as db:
        done = await export_audit(db, lines.append)
    assert done.bad >= 1
    assert done.records == len(lines) >= READS


async def test_record_of_another_copy_is_reported(victim: Victim, tmp_path: Path) -> None:
    """Two copies of a database continue one chain, as a process does that was suspended and copied.

    Their records are authentic in both.
    """
    service = EncryptedSessionService(victim.url, BACKEND, audit=Audit("blind", table=True))
    async with service:
        await service.get_session(**IDS)
        before = victim.rows()
        trail = service._auditing.trail
        assert isinstance(trail, AuditTrail)
        (chain,) = trail._free
        head = chain.head
        await service.get_session(**IDS)
        (first,) = set(victim.rows()) - set(before)
        victim.run(
            "DELETE FROM secure_audit WHERE chain = :c AND number = :n", c=first[0], n=first[1]
        )
        chain.head = head
        await service.get_session(**IDS)
        await service.get_session(**IDS)
    victim.put(first)
    (found,) = await victim.problems()
    assert "from another copy" in found


@pytest.mark.parametrize(
    "statement", ["number > 8", "chain = (SELECT min(chain) FROM secure_audit)"]
)
async def test_removed_end_or_chain_is_reported_with_heads(victim: Victim, statement: str) -> None:
    assert victim.run(f"DELETE FROM secure_audit WHERE {statement}")
    assert await victim.problems() == []  # as docs/limits.md says
    found = await victim.problems(victim.heads())
    assert len(found) >= 1
    assert all("removed" in one for one in found)


async def test_chain_that_was_written_again_is_reported_with_heads(victim: Victim) -> None:
    """An attacker with the root key can write authentic records, but not those that were logged."""
    head = next(line for line in victim.heads() if "audit.head" in line)
    forged = head[: head.index('"head": "') + 9] + "0" * 64 + '"}'
    (found,) = await victim.problems([forged])
    assert "was written again" in found


@pytest.mark.parametrize("at", [0, 10**6])
async def test_false_line_in_the_log_does_not_hide_a_chain_that_was_written_again(
    victim: Victim, at: int
) -> None:
    """An attacker with the root key, who can also add lines to the log, but remove none."""
    line = next(line for line in victim.heads() if "audit.head" in line)
    wrong = line[: line.index('"head": "') + 9] + "0" * 64 + '"}'
    lines = [line]  # of a chain that is stored as it is: `wrong` stands for what was logged
    lines.insert(at, wrong)
    found = await victim.problems(lines)
    assert any("two different heads" in one for one in found)


async def test_only_a_whole_line_is_a_head_of_the_database(victim: Victim) -> None:
    head = next(line for line in victim.heads() if "audit.head" in line)
    end = head.index('"head": "')
    chain = json.loads(head)["chain"]
    lines = [
        head.replace('"database": "', '"database": "ff'),
        head.replace('"chain": "', '"chain": "zz'),
        head.replace("audit.head", "audit.tail"),
        f"app: a user wrote {head}",
        f"{head} and more",
        f"{head}\0",
        f"[{head}]",
        f"{head[:end]}{head[end:].upper()}",
        '{"text": ' + head + "}",
        re.sub(r'"number": \d+', '"number": true', head),
        re.sub(r'"number": \d+', '"number": -1', head),
        re.sub(r'"number": \d+', f'"number": {"9" * 4300}', head).replace(chain, "0" * 32),
        "audit.head {",
        'audit.head {"event": 7}',
        "[" * 10**5 + "audit.head",
    ]
    async with Database(victim.url, BACKEND) as db:
        for line in lines:
            found = await verify_audit(db, {"log": [line]})
            (problem,) = found.problems
            assert (found.heads, found.bad) == (0, 1), line
            assert problem.detail == "no line of the log 'log' is a head of this database"
        found = await verify_audit(db, {"log": [*lines, f" {head}\r\n"]})
        assert (found.heads, found.bad) == (1, 0)


async def test_each_log_must_have_a_head(victim: Victim) -> None:
    async with Database(victim.url, BACKEND) as db:
        found = await verify_audit(db, {"today": victim.heads(), "yesterday": []})
        assert (found.heads, found.bad) == (2, 1)
        assert "'yesterday'" in found.problems[0].detail
        found = await verify_audit(db, {})  # no log at all
        assert (found.heads, found.bad) == (None, 0)


async def test_chain_that_somebody_inserts_into_is_left(victim: Victim) -> None:
    """Rows with the next numbers would stop a service that insisted on its chain."""
    service = EncryptedSessionService(victim.url, BACKEND, audit=Audit("blind", table=True))
    async with service:
        await service.get_session(**IDS)
        chain, number, *rest = victim.rows()[-1]
        victim.put(*((chain, number + n, *rest) for n in range(1, 30)))
        assert await service.get_session(**IDS) is not None
        session = await service.get_session(**IDS)
        assert session is not None
    assert victim.rows()[-1][0] > chain
    assert len(await victim.problems()) == 29


@contextmanager
def features_before(victim: Victim) -> Iterator[None]:
    """Run the block, and then store the list of features as it was before."""
    query = "SELECT value FROM secure_meta WHERE name = 'features'"
    with closing(sqlite3.connect(victim.path)) as connection:
        ((value,),) = connection.execute(query).fetchall()
    yield
    victim.run("UPDATE secure_meta SET value = :value WHERE name = 'features'", value=value)


async def test_replayed_list_of_features_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "adk_secure_sessions.audit")
    victim = Victim(tmp_path / "sessions.db", caplog)
    async with EncryptedSessionService(victim.url, BACKEND) as service:
        await service.create_session(**IDS)
    with features_before(victim):
        await victim.access()
    (found,) = await victim.problems(victim.heads())
    assert "an older list was replayed" in found
    with features_before(victim):
        async with Database(victim.url, BACKEND) as db:
            whole = await verify(db)
        assert [(one.table, one.row) for one in whole.problems] == [("secure_meta", "features")]
        assert await victim.problems() == []  # the command has added the feature again
    await victim.access()  # so does a service
    assert await victim.problems(victim.heads()) == []


async def test_long_key_of_an_inserted_row_is_shortened_in_results_and_records(
    victim: Victim,
) -> None:
    victim.run("INSERT INTO secure_witnesses VALUES (zeroblob(1000000), 1, x'')")
    async with Database(victim.url, BACKEND) as db:
        (problem,) = (await verify(db)).problems  # and its record is stored: there is no error
    assert problem.row == "00" * 100 + "..."


async def test_dropped_table_stops_services(victim: Victim) -> None:
    victim.run("DROP TABLE secure_audit")
    with pytest.raises(Exception, match="secure_audit was removed"):
        await victim.access()


DISCARDS = {
    "trigger": ["CREATE TRIGGER t BEFORE INSERT ON secure_audit BEGIN SELECT RAISE(IGNORE); END"],
    "view": [
        "ALTER TABLE secure_audit RENAME TO kept",
        "CREATE VIEW secure_audit AS SELECT * FROM kept",
        "CREATE TRIGGER t INSTEAD OF INSERT ON secure_audit BEGIN SELECT 1; END",
    ],
}


@pytest.mark.parametrize("statements", DISCARDS.values(), ids=DISCARDS)
async def test_nothing_is_read_if_the_database_discards_the_record(
    victim: Victim, statements: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_CONFLICTS", 3)
    service = EncryptedSessionService(victim.url, BACKEND, audit=Audit("blind", table=True))
    async with service, Database(victim.url, BACKEND) as db:
        found = await service.get_session(**IDS)
        assert found is not None
        for statement in statements:
            victim.run(statement)
        for call in (
            lambda: service.get_session(**IDS),
            lambda: service.list_sessions(app_name="clinic"),
            lambda: service.get_session(**{**IDS, "session_id": "missing"}),
            lambda: erase_user(db, "clinic", "ada"),
            lambda: rotate_data(db),
        ):
            # A command also reads the list of tables, in which the table is missing.
            with pytest.raises(SecureSessionError, match=r"did not store the rec|was removed"):
                await call()
        with pytest.raises(SecureSessionError):
            await service.delete_session(**IDS)
    assert victim.run("UPDATE secure_sessions SET id = id") == 1  # nothing was deleted


async def test_purged_chain_that_is_replayed_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "adk_secure_sessions.audit")
    victim = Victim(tmp_path / "sessions.db", caplog)
    with mock.patch("time.time_ns", return_value=time_ns() - 10 * 86_400 * 10**9):
        await victim.access()
    rows = victim.rows()
    async with Database(victim.url, BACKEND) as db:
        assert (await purge_audit(db, timedelta(days=5))).chains == 1
    assert await victim.problems(victim.heads()) == []
    victim.put(*rows)
    (found,) = await victim.problems()
    assert "it was replayed" in found
    victim.run("DELETE FROM secure_audit WHERE chain = :chain", chain=rows[0][0])
    # The record that names the chain cannot be removed unnoticed, either.
    victim.run("DELETE FROM secure_audit WHERE chain = (SELECT min(chain) FROM secure_audit)")
    assert len(await victim.problems(victim.heads())) == 2


async def test_purge_deletes_no_chain_that_was_tampered_with(victim: Victim) -> None:
    with mock.patch("time.time_ns", return_value=time_ns() - 10 * 86_400 * 10**9):
        await victim.access()
    oldest = victim.rows()[0][0]
    for change in ("number = 1", "number = 0"):
        row = next(one for one in victim.rows() if one[0] == oldest)
        victim.run(f"DELETE FROM secure_audit WHERE chain = :chain AND {change}", chain=oldest)
        async with Database(victim.url, BACKEND) as db:
            done = await purge_audit(db, timedelta(days=5))
        assert (done.chains, done.bad) == (0, 1)
        victim.put(row)
