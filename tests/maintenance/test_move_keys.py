"""Keys are moved into a key database and back, whatever interrupts that; no key is ever lost."""

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import sqlalchemy as sa
from google.adk.sessions import InMemorySessionService

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedSessionService,
    EncryptedSessionWrapper,
    SecureSessionError,
    TamperedError,
    WrongKeyError,
)
from adk_secure_sessions.maintenance import Database, KeyMove, erase_user, move_keys, status, verify
from tests.faults import Faults, Point, lost, with_faults
from tests.key_database.support import Pair, count, empty_pair, marks, pair_in
from tests.maintenance.dying import Statements, dying
from tests.maintenance.support import (
    APP,
    NEW,
    OLD,
    Killed,
    content,
    event,
    fill,
    plaintext_backend,
    query,
    run_sql,
)
from tests.processes import children, results
from tests.servers import for_service

AES = AesGcmBackend(OLD)
INTO: Literal["key-db"] = "key-db"
BACK: Literal["db"] = "db"
Content = dict[tuple[str, str], str]
KEY_ROWS = {
    "secure_keyring": "id, purpose, root_key_id, created_at, wrapped",
    "secure_data_keys": "id, owner, generation, backend_id, created_at, wrapped",
}


LATER = ["mariadb mariadb", "sqlite postgresql", "postgresql mariadb"]
# The commands on keys in another database are tested on servers in tests/key_database.
in_files = pytest.mark.parametrize(
    "pair",
    [
        "sqlite sqlite",
        *(pytest.param(n, marks=pytest.mark.soak) for n in ["postgresql postgresql", *LATER]),
    ],
    indirect=True,
)


@pytest.fixture(
    params=[
        "sqlite sqlite",
        "postgresql postgresql",
        *(pytest.param(name, marks=pytest.mark.soak) for name in LATER),
    ]
)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """A place for the data and one for the keys, both empty."""
    with empty_pair(request, tmp_path) as found:
        yield found


@pytest.fixture
def files(tmp_path: Path) -> Pair:
    return pair_in(tmp_path)


def alone(pair: Pair) -> EncryptedSessionService:
    """A service without the key database."""
    return EncryptedSessionService(for_service(pair.data), AES)


def together(pair: Pair) -> EncryptedSessionService:
    return EncryptedSessionService(**pair.urls, backend=AES)


def database(pair: Pair) -> Database:
    return Database(**pair.urls, backend=AES)


def service_in(pair: Pair, place: str) -> EncryptedSessionService:
    return together(pair) if place == INTO else alone(pair)


async def prepare(pair: Pair, to: str) -> None:
    """Sessions in a database from which `move_keys` can move the keys to *to*."""
    await fill(for_service(pair.data), AES)
    if to == BACK:
        await move(pair, INTO)


async def move(pair: Pair, to: Any) -> KeyMove:
    async with database(pair) as db:
        return await move_keys(db, to)


def keys_in(place: sa.URL) -> set[tuple[Any, ...]]:
    """All master keys and data keys; the ids of masters as they were created."""
    engine = sa.create_engine(place)
    present = sa.inspect(engine).get_table_names()
    engine.dispose()
    found = set()
    for table, columns in KEY_ROWS.items():
        if table in present:
            for number, *rest in query(place, f"SELECT {columns} FROM {table}"):
                found.add((table, number if number >= 0 else ~number, *rest))
    return found


async def assert_moved(pair: Pair, to: str, keys: set[tuple[Any, ...]], before: Content) -> None:
    new, old = (pair.keys, pair.data) if to == INTO else (pair.data, pair.keys)
    assert (keys_in(new), keys_in(old)) == (keys, set())
    assert await content(service_in(pair, to)) == before
    other = together(pair) if to == BACK else alone(pair)
    async with other:
        with pytest.raises(ConfigurationError, match="key_db_url"):
            await other.prepare_tables()
    urls = pair.urls if to == INTO else {"db_url": for_service(pair.data)}
    async with Database(**urls, backend=AES) as db:
        found = await verify(db)
        assert (found.bad, found.unchecked) == (0, 0)
        assert (await status(db)).unfinished == ()
    assert "move" not in marks(pair.data)
    in_keys = marks(pair.keys)
    if to == INTO:
        assert in_keys.pop("features").startswith("- ")
        assert in_keys.pop("holds") == "keys"
        assert marks(pair.data) == in_keys | {"holds": "data"}
    else:
        assert in_keys == {}
        assert sorted(marks(pair.data)) == ["database_id", "features", "format"]


def cleared(old: sa.URL) -> tuple[bool, tuple[str, ...]]:
    """The tables of the tests' MariaDB share a file, which cannot be cleared."""
    if old.get_backend_name() != "mariadb":
        return True, ()
    reason = "the table shares its file with other tables: innodb_file_per_table is off"
    names = ["secure_keyring", "secure_data_keys"]
    return False, tuple(f"{name}: {reason}" for name in names)


async def test_keys_move_into_a_key_database_and_back(pair: Pair) -> None:
    await prepare(pair, INTO)
    before, keys = await content(alone(pair)), keys_in(pair.data)
    done = await move(pair, INTO)
    assert done == KeyMove("key-db", 2, 3, False, *cleared(pair.data))
    await assert_moved(pair, INTO, keys, before)
    again = await move(pair, INTO)
    assert again == replace(done, resumed=True)
    back = await move(pair, BACK)
    assert back == KeyMove("db", 2, 3, False, *cleared(pair.keys))
    await assert_moved(pair, BACK, keys, before)
    assert (await move(pair, BACK)).resumed
    await move(pair, INTO)
    await assert_moved(pair, INTO, keys, before)


def copy_of(files: Pair, directory: Path) -> Pair:
    """A copy of both files, which no process uses."""
    directory.mkdir()
    copied = pair_in(directory)
    for source, target in zip(files, copied, strict=True):
        if Path(source.database or "").exists():
            shutil.copy(source.database or "", target.database or "")
    return copied


async def assert_no_key_is_lost(pair: Pair, to: str, keys: set[tuple[Any, ...]]) -> None:
    """One place has all keys, and services use either this place or none."""
    assert keys in (keys_in(pair.data), keys_in(pair.keys))
    for service, place in ((alone(pair), pair.data), (together(pair), pair.keys)):
        async with service:
            with contextlib.suppress(ConfigurationError):
                await service.prepare_tables()
                assert keys_in(place) == keys


@pytest.mark.parametrize(
    ("fault", "step"),
    [(Killed, 5), *(pytest.param(fault, 1, marks=pytest.mark.soak) for fault in (Killed, lost))],
)
@pytest.mark.parametrize("to", [INTO, BACK])
async def test_move_that_is_interrupted_anywhere_loses_no_key_and_is_continued(
    files: Pair, tmp_path: Path, to: Any, fault: Callable[[], Exception], step: int
) -> None:
    """After a lost connection, the same run continues; another error ends the run."""
    await prepare(files, to)
    keys = keys_in(files.keys if to == BACK else files.data)
    before = await content(service_in(files, BACK if to == INTO else INTO))
    number = 0
    for part in Faults._fields:
        for nth in range(1, 100, step):
            number += 1
            one = copy_of(files, tmp_path / str(number))
            db, faults = with_faults(lambda one=one: database(one))  # type: ignore[misc]
            plan = getattr(faults, part).after(Point.RUN, fault(), nth=nth)
            async with db:
                with contextlib.suppress(Killed):
                    await move_keys(db, to)
            if not plan.happened:
                break
            await assert_no_key_is_lost(one, to, keys)
            await move(one, to)
            new, old = (one.keys, one.data) if to == INTO else (one.data, one.keys)
            assert (keys_in(new), keys_in(old)) == (keys, set())
        assert await content(service_in(one, to)) == before  # type: ignore[possibly-undefined]
    assert number > 12 // step


def move_and_die(say: Callable[[object], None], pair: Pair, to: Any, last: int) -> None:
    statements = Statements(last, "COMMIT|DELETE|INSERT|UPDATE|VACUUM|checkpoint")
    db = dying(lambda: database(pair), statements, *pair)

    async def main() -> None:
        async with db:
            await move_keys(db, to)

    asyncio.run(main())
    say("ended")


@pytest.mark.parametrize(
    "last", [12, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 50))]
)
@pytest.mark.parametrize("to", [INTO, BACK])
async def test_killed_process_loses_no_key(pair: Pair, to: str, last: int) -> None:
    await prepare(pair, to)
    keys = keys_in(pair.keys if to == BACK else pair.data)
    before = await content(service_in(pair, BACK if to == INTO else INTO))
    with children((move_and_die, pair, to, last)) as (child,):
        said = list(child.said())
        child.process.join()
        assert child.process.exitcode == (0 if said else -signal.SIGKILL)
    await assert_no_key_is_lost(pair, to, keys)
    await move(pair, to)
    await assert_moved(pair, to, keys, before)


@pytest.mark.parametrize("to", [INTO, BACK])
async def test_unfinished_move_is_not_continued_in_the_other_direction(
    files: Pair, to: Any
) -> None:
    await prepare(files, to)
    keys = keys_in(files.keys if to == BACK else files.data)
    await interrupt(files, to)
    async with together(files) as service:
        with pytest.raises(ConfigurationError, match="are being moved: run `adk-secure-sessions"):
            await service.prepare_tables()
    other = BACK if to == INTO else INTO
    with pytest.raises(ConfigurationError, match=f"move-keys --to {to}`"):
        await move(files, other)
    await move(files, to)
    assert keys_in(files.keys if to == INTO else files.data) == keys


async def interrupt(pair: Pair, to: Any) -> None:
    """Kill a move between its last change of the source and the end."""
    db, faults = with_faults(lambda: database(pair))
    holds = "data" if to == INTO else None
    source = faults.data if to == INTO else faults.keys
    source.before(Point.RUN, Killed(), when=lambda *_: is_switched(pair, holds))
    async with db:
        with pytest.raises(Killed):
            await move_keys(db, to)


def is_switched(pair: Pair, holds: str | None) -> bool:
    found = marks(pair.data)
    return found.get("holds") == holds and "moving" in found.get("features", "")


# --- services and commands that run during the move ----------------------------------------------


def move_in_child(say: Callable[[object], None], pair: Pair, to: Any) -> None:
    done = asyncio.run(move(pair, to))
    say((done.to, *done.numbers))


@in_files
@pytest.mark.parametrize("to", [INTO, BACK])
async def test_service_that_runs_on_loses_nothing_and_creates_no_key_in_the_old_place(
    pair: Pair, to: str
) -> None:
    await prepare(pair, to)
    old = pair.data if to == INTO else pair.keys
    async with service_in(pair, BACK if to == INTO else INTO) as service:
        session = await service.get_session(app_name=APP, user_id="ada", session_id="s0")
        assert session is not None
        assert results((move_in_child, pair, to)) == [[(to, 2, 3)]]
        await service.append_event(session, event(50, n=50))  # with a data key from memory
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="key_db_url"):
                await service.create_session(app_name=APP, user_id="new", session_id="s")
            with pytest.raises(ConfigurationError, match="key_db_url"):
                await service.get_session(app_name=APP, user_id="bob", session_id="s0")
    assert count(old, "secure_data_keys") == count(old, "secure_keyring") == 0
    async with service_in(pair, to) as service:
        session = await service.get_session(app_name=APP, user_id="ada", session_id="s0")
        assert session is not None
        assert len(session.events) == 4


async def create_user(service: EncryptedSessionService) -> None:
    async with service:
        await service.create_session(app_name=APP, user_id="new", session_id="s", state={"n": 1})


@in_files
@pytest.mark.parametrize("to", [INTO, BACK])
async def test_running_service_creates_no_key_once_the_move_has_begun(pair: Pair, to: Any) -> None:
    await prepare(pair, to)
    old = pair.data if to == INTO else pair.keys
    before = keys_in(old)
    db, faults = with_faults(lambda: database(pair))
    source = faults.data if to == INTO else faults.keys
    source.after(Point.RUN, Killed(), when=lambda *_: "moving" in marks(old)["features"])
    async with service_in(pair, BACK if to == INTO else INTO) as service:
        await service.get_session(app_name=APP, user_id="ada", session_id="s0")
        async with db:
            with pytest.raises(Killed):
                await move_keys(db, to)
        with pytest.raises(ConfigurationError, match="are being moved"):
            await service.create_session(app_name=APP, user_id="new", session_id="s")
    assert keys_in(old) == before
    assert (await move(pair, to)).resumed


@in_files
async def test_keys_that_differ_after_the_copy_are_not_deleted(pair: Pair) -> None:
    await prepare(pair, INTO)
    keys = keys_in(pair.data)
    db, faults = with_faults(lambda: database(pair))
    text = "UPDATE secure_data_keys SET created_at = created_at + 1"
    copied = lambda step, _: "secure_keyring" in str(step and step.query)  # noqa: E731
    faults.keys.before(Point.READ, lambda: run_sql(pair.keys, text), when=copied)
    async with db:
        with pytest.raises(SecureSessionError, match="stop all services"):
            await move_keys(db, INTO)
    assert keys_in(pair.data) == keys


@in_files
async def test_erasure_that_knows_the_old_place_fails_and_deletes_nothing(pair: Pair) -> None:
    """Otherwise the data key would stay in the key database, and no row would name the user."""
    await prepare(pair, INTO)
    async with Database(for_service(pair.data), AES) as db:
        await db.keyring()
        await move(pair, INTO)
        with pytest.raises(ConfigurationError, match="were moved"):
            await erase_user(db, APP, "bob")
    async with database(pair) as db:
        await db.keyring()
        done = await erase_user(db, APP, "ada")
        assert (done.data_keys, done.users) == (1, 1)
        await move(pair, BACK)
        with pytest.raises(ConfigurationError, match="were moved"):
            await erase_user(db, APP, "bob")
    assert count(pair.data, "secure_users") == 1


# --- what is rejected -----------------------------------------------------------------------------


async def test_old_copy_of_the_data_does_not_overwrite_or_delete_keys_in_use(
    files: Pair, tmp_path: Path
) -> None:
    """The key database has keys that the old copy lacks."""
    await prepare(files, INTO)
    old = copy_of(files, tmp_path / "old")
    await move(files, INTO)
    await create_user(together(files))
    keys = keys_in(files.keys)
    mixed = Pair(old.data, files.keys)
    with pytest.raises(ConfigurationError, match="may be in use"):
        await move(mixed, INTO)
    with pytest.raises(ConfigurationError, match="may be in use"):
        await move(mixed, BACK)
    assert keys_in(files.keys) == keys


@pytest.mark.parametrize("to", [INTO, BACK])
async def test_old_copy_of_the_data_does_not_overwrite_keys_of_an_unfinished_move(
    files: Pair, tmp_path: Path, to: Any
) -> None:
    """Only the key database still has all keys."""
    await prepare(files, INTO)
    old = copy_of(files, tmp_path / "old")
    if to == BACK:
        await move(files, INTO)
    await create_user(together(files) if to == BACK else alone(files))
    await interrupt(files, to)
    keys = keys_in(files.keys)
    with pytest.raises(ConfigurationError, match=r"old copy of the data|move-keys --to db"):
        await move(Pair(old.data, files.keys), INTO)
    assert keys_in(files.keys) == keys


async def test_key_database_of_another_database_is_rejected(files: Pair, tmp_path: Path) -> None:
    await prepare(files, INTO)
    (tmp_path / "other").mkdir()
    other = pair_in(tmp_path / "other")
    await prepare(other, BACK)
    for to in (INTO, BACK):
        with pytest.raises(ConfigurationError, match="belongs to another"):
            await move(Pair(files.data, other.keys), to)
    with pytest.raises(ConfigurationError, match="names a database of sessions"):
        await move(Pair(files.data, other.data), INTO)


async def test_modified_features_of_an_unfinished_move_are_rejected(files: Pair) -> None:
    await prepare(files, INTO)
    await interrupt(files, INTO)
    text = "UPDATE secure_meta SET value = replace(value, ' ', ',expiry ') WHERE name = 'features'"
    run_sql(files.keys, text)
    with pytest.raises(WrongKeyError):
        await move(files, INTO)


@pytest.mark.parametrize("to", [INTO, BACK])
async def test_move_with_a_wrong_root_key_changes_nothing(files: Pair, to: Any) -> None:
    await prepare(files, to)
    before = [(marks(place), keys_in(place)) for place in (files.data, files.keys) if to == BACK]
    async with Database(**files.urls, backend=AesGcmBackend(NEW)) as db:
        with pytest.raises(WrongKeyError):
            await move_keys(db, to)
    if to == BACK:
        assert [(marks(place), keys_in(place)) for place in (files.data, files.keys)] == before
    else:
        assert keys_in(files.keys) == set()
        assert sorted(marks(files.data)) == ["database_id", "features", "format"]


async def test_keys_of_a_wrapper_stay_beside_its_users(files: Pair) -> None:
    inner = InMemorySessionService()
    async with EncryptedSessionWrapper(inner, AES, key_db_url=for_service(files.data)) as service:
        await service.create_session(app_name=APP, user_id="ada")
    with pytest.raises(ConfigurationError, match="EncryptedSessionWrapper"):
        await move(files, INTO)
    assert keys_in(files.keys) == set()


async def test_malformed_data_key_is_named_and_nothing_is_moved(files: Pair) -> None:
    await prepare(files, INTO)
    run_sql(files.data, "UPDATE secure_data_keys SET wrapped = 'text' WHERE generation = 0")
    with pytest.raises(TamperedError, match="secure_data_keys"):
        await move(files, INTO)
    assert "holds" not in marks(files.data)


async def test_key_database_in_memory_is_rejected(files: Pair) -> None:
    await prepare(files, INTO)
    async with Database(for_service(files.data), AES, key_db_url="sqlite+aiosqlite://") as db:
        with pytest.raises(ConfigurationError, match="in memory"):
            await move_keys(db, INTO)


async def test_move_needs_a_key_database_and_existing_data(files: Pair) -> None:
    async with Database(for_service(files.data), AES) as db:
        with pytest.raises(ConfigurationError, match="key_db_url"):
            await move_keys(db, INTO)
    with pytest.raises(ConfigurationError, match="there is no file"):
        await move(files, INTO)
    await prepare(files, INTO)
    with pytest.raises(ConfigurationError, match="'key-db' or 'db'"):
        await move(files, "elsewhere")
    with pytest.raises(ConfigurationError, match="there is no file"):
        await move(files, BACK)


async def test_moved_keys_are_not_left_in_the_file(files: Pair) -> None:
    await prepare(files, INTO)
    wrapped = [row[-1] for row in keys_in(files.data)]
    for to, old in ((INTO, files.data), (BACK, files.keys)):
        await move(files, to)
        stored = b"".join(
            path.read_bytes()
            for path in Path(old.database or "").parent.glob(f"{Path(old.database or '').name}*")
        )
        assert [key for key in wrapped if key in stored] == []


async def test_warning_about_plaintext_records_moves_with_the_keys(files: Pair) -> None:
    backend = plaintext_backend()
    await fill(for_service(files.data), backend)
    async with Database(**files.urls, backend=backend) as db:
        await move_keys(db, INTO)
        assert marks(files.keys)["plaintext"] == "1"
        await move_keys(db, BACK)
    assert marks(files.data)["plaintext"] == "1"


async def test_mark_of_a_complete_migration_moves_with_the_keys(files: Pair) -> None:
    """Without the mark, services would read plaintext sessions of the source again."""
    await prepare(files, INTO)
    async with Database(for_service(files.data), AES) as db:
        await db.imports.store_mark()
    mark = marks(files.data)["migration"]
    await move(files, INTO)
    assert marks(files.keys)["migration"] == mark
    assert "migration" not in marks(files.data)
    async with database(files) as db:
        assert await db.imports.migration_mark()
    await move(files, BACK)
    assert marks(files.data)["migration"] == mark
