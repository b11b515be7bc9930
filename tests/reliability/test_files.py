"""SQLite files on a full disk, deleted, replaced, read-only or damaged, under a running service.

Each test ends with a service that works again, and says how it came to that.
"""

import asyncio
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from google.adk.sessions import Session

from adk_secure_sessions import (
    AesGcmBackend,
    DatabaseError,
    EncryptedSessionService,
    SecureSessionError,
    maintenance,
)
from tests.conformance.support import (
    APP,
    USER,
    create,
    delete,
    event,
    find,
    listed,
    rejected_as_stale,
    reload,
)
from tests.processes import results
from tests.reliability.results import Record, seen
from tests.servers import PostgreSQL

KEY = bytes(range(32))
LARGE = "x" * 20_000
PAGE = 8192  # of our SQLite files


def open_service(path: Path) -> EncryptedSessionService:
    return EncryptedSessionService(f"sqlite+aiosqlite:///{path}", AesGcmBackend(KEY))


async def assert_whole(url: str, sessions: int) -> None:
    async with maintenance.Database(url, AesGcmBackend(KEY)) as db:
        found = await maintenance.verify(db)
    assert (found.bad, found.unchecked, found.sessions) == (0, 0, sessions), found.problems


async def each_operation(
    service: EncryptedSessionService, session: Session
) -> dict[str, DatabaseError]:
    """Call every operation, all of which must fail; return the errors."""
    await asyncio.sleep(0.11)  # reads look for the file at most ten times a second
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "get": lambda: find(service, session),
        "list": lambda: listed(service),
        "append": lambda: service.append_event(session, event("lost", delta={"k": 1})),
        "create": lambda: create(service, "another"),
        "delete": lambda: delete(service, session),
    }
    errors = {}
    for name, call in calls.items():
        with pytest.raises(DatabaseError) as raised:
            await call()
        errors[name] = raised.value
    return errors


# --- a full disk ---------------------------------------------------------------------------------


class SmallDisk:
    """A file system in memory that is soon full; `free` makes it larger."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def free(self) -> None:
        subprocess.run(["mount", "-o", "remount,size=64m", self.directory], check=True)


@pytest.fixture
def small_disk() -> Iterator[SmallDisk]:
    with tempfile.TemporaryDirectory(prefix="disk-") as name:
        mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0777", "tmpfs", name]
        try:
            done = subprocess.run(mount, capture_output=True, check=False)
        except OSError:
            done = None
        if done is None or done.returncode:
            pytest.skip("only root may mount a small file system; see also test_full_disk")
        try:
            yield SmallDisk(Path(name))
        finally:
            subprocess.run(["umount", "-l", name], check=True)


async def fill(
    service: EncryptedSessionService, session: Session
) -> tuple[list[str], list[DatabaseError]]:
    """Append until that fails ten times; return the ids of the events stored, and the errors."""
    appended: list[str] = []
    errors: list[DatabaseError] = []
    while len(errors) < 10:
        one = event("x" * 3000 if errors else LARGE)
        try:
            await service.append_event(session, one)
            appended.append(one.id)
        except DatabaseError as error:
            errors.append(error)
    return appended, errors


async def use_full_disk(
    disk: SmallDisk, url: str, record: Record, database: str, code: str
) -> None:
    """Fill it, read what was stored, free space and go on."""
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        session = await create(service)
        appended, errors = await fill(service, session)
        assert len(appended) > 20
        assert {(error.code, error.retryable) for error in errors} == {(code, True)}
        stored = await reload(service, session)  # reading needs no space
        assert [one.id for one in stored.events] == appended
        assert stored == session
        disk.free()
        freed = time.monotonic()
        await service.append_event(session, event("goes on", delta={"user:k": 1}))
        pause = time.monotonic() - freed
        assert await reload(service, session) == session
    await assert_whole(url, 1)
    record.fault(
        f"full disk/{database}", times=1, acknowledged=len(appended) + 2, errors=errors, pause=pause
    )


async def test_full_disk_loses_nothing_and_the_service_works_when_it_has_space_again(
    small_disk: SmallDisk, record: Record
) -> None:
    url = f"sqlite:///{small_disk.directory}/sessions.db"
    await use_full_disk(small_disk, url, record, "sqlite", "SQLITE_FULL")


async def test_full_disk_of_postgresql_loses_nothing(
    small_disk: SmallDisk, postgresql: PostgreSQL, record: Record
) -> None:
    if postgresql.directory is None:
        pytest.skip("the server is not private: its tablespaces stay as they are")
    directory = small_disk.directory / "space"
    directory.mkdir()
    shutil.chown(directory, (postgresql.directory / "data").owner())
    with postgresql.database() as url, postgresql.admin.connect() as admin:
        admin.exec_driver_sql(
            f"CREATE TABLESPACE small OWNER {url.username} LOCATION '{directory}'"
        )
        admin.exec_driver_sql(f"ALTER ROLE {url.username} SET default_tablespace = 'small'")
        by_asyncpg = url.set(drivername="postgresql+asyncpg")
        shown = by_asyncpg.render_as_string(hide_password=False)
        await use_full_disk(small_disk, shown, record, "postgresql", "53100")
        # The directory goes before the tablespace can, which must be empty.
        tables = [
            row[0]
            for row in admin.exec_driver_sql(
                f"SELECT table_name FROM information_schema.tables "
                f"WHERE table_schema = '{url.username}'"
            )
        ]
        for table in tables:
            admin.exec_driver_sql(f"DROP TABLE {url.username}.{table} CASCADE")
        admin.exec_driver_sql("DROP TABLESPACE small")


# --- deleted and replaced ------------------------------------------------------------------------


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[tuple[Path, EncryptedSessionService, Session]]:
    """A file, a service that has read and written it with all its threads, and a session."""
    path = tmp_path / "sessions.db"
    async with open_service(path) as service:
        session = await create(service, state={"user:name": "Ada"})
        await service.append_event(session, event("first", delta={"k": 0}))
        await asyncio.gather(*(reload(service, session) for _ in range(5)))
        yield path, service, session


def files(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}*"))


def texts(session: Session) -> list[str | None]:
    contents = (one.content for one in session.events)
    return [part.text for one in contents if one for part in one.parts or ()]


async def test_file_that_was_deleted_under_a_service_is_an_error_and_is_not_made_again(
    opened: tuple[Path, EncryptedSessionService, Session], record: Record
) -> None:
    path, service, session = opened
    before = session.model_copy(deep=True)
    for one in files(path):
        one.unlink()
    errors = await each_operation(service, session)
    assert {error.retryable for error in errors.values()} == {False}
    assert all("was deleted or replaced" in str(error) for error in errors.values())
    assert files(path) == []
    assert session == before
    record.fault("file deleted/sqlite", times=1, errors=errors.values())
    await service.close()  # a restart: the file that is there now is used, or a new one made
    assert await find(service, session) is None
    await service.append_event(await create(service), event("new"))
    await assert_whole(f"sqlite:///{path}", 1)


async def test_file_that_was_moved_away_is_an_error_until_it_is_back(
    opened: tuple[Path, EncryptedSessionService, Session], record: Record
) -> None:
    path, service, session = opened
    aside = path.with_name("aside.db")
    path.rename(aside)
    errors = await each_operation(service, session)
    creations = (create(service, f"number {number}") for number in range(8))
    found = await asyncio.gather(*creations, return_exceptions=True)
    assert len({id(error) for error in found}) == 8, "two callers got the same error object"
    assert not path.exists()
    aside.rename(path)
    back = time.monotonic()
    await service.append_event(session, event("goes on", delta={"k": 2}))
    pause = time.monotonic() - back
    assert await reload(service, session) == session
    assert texts(session) == ["first", "goes on"]
    await service.close()
    await assert_whole(f"sqlite:///{path}", 1)
    record.fault("file moved/sqlite", times=1, acknowledged=3, errors=errors.values(), pause=pause)


@pytest.mark.parametrize("other", ["older copy", "another database", "empty file"])
async def test_file_that_was_replaced_under_a_service_is_an_error_and_stays_as_it_is(
    opened: tuple[Path, EncryptedSessionService, Session],
    other: str,
    tmp_path: Path,
    record: Record,
) -> None:
    path, service, session = opened
    replacement = tmp_path / "replacement" / "sessions.db"
    replacement.parent.mkdir()
    if other == "older copy":
        await service.close()
        shutil.copy(path, replacement)
        await service.append_event(session, event("not in the copy", delta={"k": 1}))
    elif other == "another database":
        async with open_service(replacement) as another:
            await create(another, "somebody else's")
    else:
        replacement.touch()
    content = replacement.read_bytes()
    for one in files(path)[1:]:
        one.unlink()  # as the documentation of SQLite demands of whoever restores a file
    os.replace(replacement, path)
    errors = await each_operation(service, session)
    assert all("was deleted or replaced" in str(error) for error in errors.values())
    record.fault(f"file replaced by {other}/sqlite", times=1, errors=errors.values())
    await service.close()
    assert path.read_bytes() == content, "the service has written to the other file"
    assert files(path) == [path]
    if other == "older copy":  # after a restart
        found = await reload(service, session)
        assert texts(found) == ["first"]
        with rejected_as_stale():
            await service.append_event(session, event("of the newer file"))
    else:
        assert await find(service, session) is None


async def test_maintenance_of_a_file_that_was_replaced_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    url = f"sqlite:///{path}"
    async with open_service(path) as service:
        await create(service)
    content = path.read_bytes()
    async with maintenance.Database(url, AesGcmBackend(KEY)) as db:
        assert (await maintenance.verify(db)).sessions == 1
        shutil.copy(path, tmp_path / "copy.db")
        os.replace(tmp_path / "copy.db", path)
        await asyncio.sleep(0.11)
        for work in (maintenance.verify, maintenance.rotate_master, maintenance.rotate_data):
            with pytest.raises(DatabaseError, match="was deleted or replaced"):
                await work(db)
    assert path.read_bytes() == content


# --- read-only -----------------------------------------------------------------------------------


def use_read_only(say: Callable[[object], None], path: str) -> None:
    async def main() -> None:
        async with open_service(Path(path)) as warm:  # imports all, since Python may be root's
            assert await warm.get_session(app_name=APP, user_id=USER, session_id="session")
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        async with open_service(Path(path)) as service:
            session = await service.get_session(app_name=APP, user_id=USER, session_id="session")
            assert session is not None
            before = session.model_copy(deep=True)
            for call in (
                lambda: service.append_event(session, event("lost", delta={"user:k": 1})),
                lambda: create(service, "another"),
                lambda: delete(service, session),
            ):
                try:
                    await call()
                except SecureSessionError as error:
                    say((seen(error), error.retryable))
            assert session == before
            assert await reload(service, session) == session

    asyncio.run(main())


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("file", "directory"), [(0o444, 0o555), pytest.param(0o444, 0o777, marks=pytest.mark.soak)]
)
async def test_read_only_file_can_be_read_and_writes_are_errors(
    file: int, directory: int, record: Record
) -> None:
    with tempfile.TemporaryDirectory() as name:  # tmp_path is closed to other accounts
        path = Path(name, "sessions.db")
        async with open_service(path) as service:
            session = await create(service, state={"k": 1})
            await service.append_event(session, event("text"))
        path.chmod(file)
        Path(name).chmod(directory)
        (said,) = await asyncio.to_thread(results, (use_read_only, str(path)))
        assert len(said) == 3
        assert {retryable for _, retryable in said} == {False}
        path.chmod(0o600)
        Path(name).chmod(0o755)
        async with open_service(path) as service:  # after a restart
            await service.append_event(session, event("goes on"))
            assert await reload(service, session) == session
        place = "file" if directory == 0o777 else "file and directory"
        record.fault(
            f"read-only {place}/sqlite", times=1, acknowledged=3, errors=[text for text, _ in said]
        )


# --- damaged pages -------------------------------------------------------------------------------

SESSIONS = 6


async def fill_file(path: Path) -> dict[str, str]:
    """Sessions of two users with large and small states; return what a service reads, as JSON."""
    async with open_service(path) as service:
        for number in range(SESSIONS):
            state = {"k": LARGE if number % 3 == 0 else number, "user:k": number, "app:k": number}
            session = await create(service, f"s{number}", user_id=f"u{number % 2}", state=state)
            for n in range(5):
                await service.append_event(session, event(f"{n} " + "y" * 900, delta={"n": n}))
    right, _ = await read_all(path)
    assert len(right) == SESSIONS + 4
    return right


async def read_all(path: Path) -> tuple[dict[str, str], list[SecureSessionError]]:
    """Read everything; return what was read, and the errors.  Any other error is raised."""
    read: dict[str, str] = {}
    errors: list[SecureSessionError] = []
    async with open_service(path) as service:
        for number in range(SESSIONS):
            user = f"u{number % 2}"
            try:
                found = await service.get_session(
                    app_name=APP, user_id=user, session_id=f"s{number}"
                )
                read[f"get {number}"] = found.model_dump_json() if found else "none"
            except SecureSessionError as error:
                errors.append(error)
        for owner in ("u0", "u1"):
            try:
                sessions = (await service.list_sessions(app_name=APP, user_id=owner)).sessions
                read[f"list {owner}"] = "\n".join(sorted(one.model_dump_json() for one in sessions))
                state = await service.get_user_state(app_name=APP, user_id=owner)
                read[f"state {owner}"] = repr(state)
            except SecureSessionError as error:
                errors.append(error)
    return read, errors


def damages(content: bytes, cases: int, chance: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield damaged copies of a file: *cases* for each page, then files that are cut off."""
    pages = len(content) // PAGE
    for page in range(pages):
        for case in range(cases):
            kind = ("zeros", "ones", "random", "bit", "moved page")[(page + case) % 5]
            start = page * PAGE
            # The header of a page, where SQLite keeps its structure, or anywhere in the page.
            at = start + (chance.randrange(24) if case % 2 else chance.randrange(PAGE))
            length = min(chance.choice([1, 4, 16, 200, 2000]), start + PAGE - at)
            if kind == "zeros":
                new = bytes(length)
            elif kind == "ones":
                new = b"\xff" * length
            elif kind == "random":
                new = chance.randbytes(length)
            elif kind == "bit":
                new = bytes([content[at] ^ 1 << chance.randrange(8)])
            else:
                other = chance.randrange(pages)
                at, new = start, content[other * PAGE : (other + 1) * PAGE]
            yield kind, content[:at] + new + content[at + len(new) :]
    for size in (0, 100, PAGE, PAGE * (pages // 2), PAGE * (pages // 2) + 1000, len(content) - 1):
        yield "cut off", content[:size]


def read_damaged_files(say: Callable[[object], None], path: str, cases: int) -> None:
    """In a process of its own: SQLite must not crash on any of them."""

    async def main() -> None:
        original = Path(path)
        right = await fill_file(original)
        copy = original.with_name("damaged.db")
        chance = random.Random(cases)
        content = original.read_bytes()
        for kind, damaged in damages(content, cases, chance):
            if damaged == content:
                continue
            for leftover in files(copy):
                leftover.unlink()
            copy.write_bytes(damaged)
            read, errors = await read_all(copy)
            wrong = {name: text for name, text in read.items() if text != right[name]}
            say((kind, [seen(error) for error in errors], wrong, right if wrong else {}))

    asyncio.run(main())


def missing_only(found: str, right: str) -> bool:
    """Whether a list of sessions lacks some, and shows the others as they are."""
    return set(found.splitlines()) < set(right.splitlines())


@pytest.mark.no_cover
@pytest.mark.parametrize("cases", [1, pytest.param(60, marks=pytest.mark.soak)])
def test_damaged_file_gives_an_error_or_the_right_data(
    cases: int, tmp_path: Path, record: Record
) -> None:
    (said,) = results((read_damaged_files, str(tmp_path / "sessions.db"), cases))
    errors: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for kind, raised, wrong, right in said:
        errors.update(set(raised))
        for name, text in wrong.items():
            # An index that no longer finds a row; docs/limits.md says so of a row that is gone.
            is_missing = text == "none" or missing_only(text, right[name]) or text == "{}"
            assert is_missing, (kind, name, text[:200])
        outcomes["missing" if wrong else "error" if raised else "right"] += 1
    assert outcomes.total() > 20 * cases
    assert outcomes["error"] > outcomes["missing"]
    for name in ("right", "error", "missing"):
        record.count(f"damaged pages/{name}", outcomes[name])
    record.fault("damaged pages/sqlite", times=outcomes.total(), errors=errors.elements())


async def test_damaged_log_of_committed_transactions_gives_an_earlier_state_or_an_error(
    tmp_path: Path, record: Record
) -> None:
    """SQLite ignores a log from its first damaged frame on: an older copy, which nobody notices."""
    path = tmp_path / "sessions.db"
    service = open_service(path)
    session = await create(service)
    for n in range(10):
        await service.append_event(session, event(str(n), delta={"n": n}))
    copy = tmp_path / "copy" / "sessions.db"
    copy.parent.mkdir()
    lengths = Counter[int]()
    log = path.with_name("sessions.db-wal").read_bytes()
    for at in range(200, len(log), len(log) // 12):
        for leftover in files(copy):
            leftover.unlink()
        shutil.copy(path, copy)
        copy.with_name("sessions.db-wal").write_bytes(log[:at] + b"\xff" * 8 + log[at + 8 :])
        async with open_service(copy) as other:
            try:
                found = await find(other, session)
            except SecureSessionError:
                lengths[-1] += 1
                continue
            events = found.events if found else []
            assert events == session.events[: len(events)]
            assert not found or found.state == ({"n": len(events) - 1} if events else {})
            lengths[len(events)] += 1
    await service.close()
    assert len(lengths) > 4
    record.fault("damaged log/sqlite", times=lengths.total())
