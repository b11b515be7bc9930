"""What an attacker does to a database, what an application does then, and what must follow.

How it works.  The database under attack, `db` in the tests, is a copy of a finished one that
`world` builds once for each backend.  The attacker changes it behind the service's back: `db.run(
"UPDATE secure_events ...")`, where `:visit` is the id of a row (`world.ROWS`); on a server,
`replica` then makes the tables equal to the file's.  `assert_rejected(db, impact, *errors)` starts
a service and runs every `Operation` (`get`, `append`, ...) that the attack must make fail.  It
expects one of *errors* from each, an unchanged database, and unchanged session objects.  Then it
reads, and appends to, the sessions that the attack must not affect.  An `Impact` lists both:
`HISTORY` is that of a tampered event, `SESSION` that of a tampered session row, and so on.
"""

import shutil
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.sessions import Session
from google.adk.sessions.base_session_service import GetSessionConfig
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import (
    EncryptedSessionService,
    EncryptionBackend,
    TamperedError,
    UnknownKeyError,
)
from adk_secure_sessions.formats.records import parse_header
from adk_secure_sessions.maintenance import Database as Maintained
from adk_secure_sessions.storage.schema import metadata
from tests.attacks.replica import Replica
from tests.attacks.world import (
    BACKENDS,
    BOB,
    CAROL,
    NOTES,
    OPTIONS,
    SECRET,
    START,
    VISIT,
    SessionIds,
    World,
    build_world,
    new_event,
)

# The record of another owner names a data key that is not this owner's.  Whether the service knows
# it as another owner's depends on what the process has read before.
MISPLACED = (TamperedError, UnknownKeyError)

Dump = dict[str, list[tuple[Any, ...]]]


class Database:
    """A copy of the world, to be attacked.

    The attacker works on the SQLite file *path*.  Without a *replica*, the service uses the same
    file; with one, it uses the replica's server, and each method here keeps the two equal.
    """

    def __init__(
        self,
        path: Path,
        backend_name: str,
        *,
        on_engine: bool = False,
        replica: Replica | None = None,
    ) -> None:
        self.path = path
        self.replica = replica
        self.world: World = build_world(backend_name)
        self.backend: Callable[[], EncryptionBackend] = BACKENDS[backend_name]
        self.options: dict[str, Any] = OPTIONS.get(backend_name, {})
        self.is_fernet = backend_name == "fernet"
        self._on_engine = on_engine
        self.restore()

    @property
    def url(self) -> str:
        if self.replica:
            return self.replica.url.render_as_string(hide_password=False)
        return f"sqlite+aiosqlite:///{self.path}"

    def restore(self) -> None:
        """Undo every attack."""
        if self.replica:
            self.replica.reset()
        self._overwrite(self.world.files[1])

    @contextmanager
    def undone_afterwards(self) -> Iterator[None]:
        """At the end, give all rows the values that they had at the beginning."""
        if self.replica:
            self.replica.pull(self.path)
        before = self.path.read_bytes()
        yield
        self._overwrite(before)

    def _overwrite(self, content: bytes) -> None:
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        self.path.write_bytes(content)
        if self.replica:
            self.replica.push(self.path, force=True)

    @asynccontextmanager
    async def service(
        self, backend: EncryptionBackend | None = None, **options: Any
    ) -> AsyncIterator[EncryptedSessionService]:
        """A service that has just started."""
        backend = backend or self.backend()
        async with (
            self._url_or_engine() as database,
            EncryptedSessionService(
                **database, backend=backend, **self.options | options
            ) as service,
        ):
            yield service

    @asynccontextmanager
    async def maintained(self) -> AsyncIterator[Maintained]:
        async with (
            self._url_or_engine() as database,
            Maintained(**database, backend=self.backend()) as opened,
        ):
            yield opened

    @asynccontextmanager
    async def _url_or_engine(self) -> AsyncIterator[dict[str, Any]]:
        if not self._on_engine:
            yield {"db_url": self.url}
            return
        engine = create_async_engine(self.url)
        try:
            yield {"db_engine": engine}
        finally:
            await engine.dispose()

    @contextmanager
    def connect(self) -> Iterator[sqlite3.Connection]:
        """Connect to the file; at the end, the replica is made equal to it."""
        if self.replica:
            self.replica.pull(self.path)
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = OFF")
            yield connection
        if self.replica:
            self.replica.push(self.path)

    def define(self, *statements: str) -> None:
        """Change the schema, in SQL that every database understands."""
        if self.replica:
            self.replica.define(*statements)
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            for statement in statements:
                connection.execute(statement)

    def run(self, sql: str, **values: object) -> None:
        """Change rows; fail if there is none to change, since such an attack proves nothing."""
        with self.connect() as connection:
            cursor = connection.execute(sql, self.world.rows | values)
            assert cursor.rowcount, f"no row was met by {sql}"

    def rows(self, sql: str, **values: object) -> list[tuple[Any, ...]]:
        with self.connect() as connection:
            return connection.execute(sql, self.world.rows | values).fetchall()

    def value(self, sql: str, **values: object) -> Any:
        ((value,),) = self.rows(sql, **values)
        return value

    def lift_constraints(self, table: str) -> None:
        """Remove keys, UNIQUE and NOT NULL from a table and, in SQLite, its columns' types."""
        if self.replica:
            self.replica.pull(self.path)
            self.replica.lift_constraints(table)
        with self.connect() as connection:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            connection.execute(f"ALTER TABLE {table} RENAME TO old_table")
            connection.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
            connection.execute(f"INSERT INTO {table} SELECT * FROM old_table")
            connection.execute("DROP TABLE old_table")

    def dump(self) -> Dump:
        if self.replica:
            self.replica.pull(self.path)
        return dump(self.path)

    @contextmanager
    def watched(self) -> Iterator[Callable[[], bool]]:
        """Yield a function that says whether anything may have changed; cheaper than a dump."""
        if self.replica:
            yield self.replica.has_changed
            return
        with closing(sqlite3.connect(self.path)) as watch:
            version = watch.execute("PRAGMA data_version").fetchone()
            yield lambda: watch.execute("PRAGMA data_version").fetchone() != version

    def older(self, directory: Path) -> "OlderCopy":
        """A copy from before the last two events of each session."""
        path = directory / "older.db"
        path.write_bytes(self.world.files[0])
        return OlderCopy(path, self)

    def session(self, who: SessionIds) -> Session:
        """A session object, as it was loaded before the attack."""
        return self.world.sessions[who].model_copy(deep=True)


class OlderCopy(NamedTuple):
    """What an attacker copied earlier, and the database to replay it to."""

    path: Path
    database: Database

    def replay_row(self, table: str, where: str) -> None:
        """Replace one row by its older version; *where* finds it in the schema `past`."""
        shutil.copy(self.path, self.path.with_suffix(".copy"))
        with self.database.connect() as connection:
            connection.execute("ATTACH ? AS past", (str(self.path.with_suffix(".copy")),))
            rows = connection.execute(
                f"SELECT * FROM past.{table} WHERE {where}", self.database.world.rows
            ).fetchall()
            assert len(rows) == 1
            assert rows[0] not in connection.execute(f"SELECT * FROM main.{table}").fetchall(), (
                "the row has not changed since: replaying it proves nothing"
            )
            slots = ", ".join("?" * len(rows[0]))
            connection.execute(f"REPLACE INTO main.{table} VALUES ({slots})", rows[0])


def dump(path: Path) -> Dump:
    """All rows of all tables; TEXT is told from a BLOB of the same bytes."""
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        names = sorted(name for (name,) in tables)
        connection.text_factory = lambda raw: f"text {raw!r}"
        return {name: connection.execute(f'SELECT * FROM "{name}"').fetchall() for name in names}


def contents(db: Database) -> Dump:
    """All rows, to be replayed later."""
    return {name: db.rows(f"SELECT * FROM {name}") for name in metadata.tables}


def named_by_records(data: Dump) -> set[int]:
    """The ids of the data keys that the records in *data* name."""
    tables = ("apps", "users", "sessions", "bases", "events", "witnesses")
    return {parse_header(row[-1])[1] for table in tables for row in data[f"secure_{table}"]}


# --- what an application does --------------------------------------------------------------------

Service = EncryptedSessionService
Operation = Callable[[Service, Database, SessionIds], Awaitable[object]]


async def get(service: Service, db: Database, who: SessionIds) -> object:
    return await service.get_session(**who._asdict())


async def get_last(service: Service, db: Database, who: SessionIds) -> object:
    return await service.get_session(**who._asdict(), config=GetSessionConfig(num_recent_events=1))


async def get_last_three(service: Service, db: Database, who: SessionIds) -> object:
    return await service.get_session(**who._asdict(), config=GetSessionConfig(num_recent_events=3))


async def get_no_events(service: Service, db: Database, who: SessionIds) -> object:
    return await service.get_session(**who._asdict(), config=GetSessionConfig(num_recent_events=0))


async def get_after(service: Service, db: Database, who: SessionIds) -> object:
    """Events from a time on that is after the last: those left out must be authentic, too."""
    config = GetSessionConfig(after_timestamp=START + 1000)
    return await service.get_session(**who._asdict(), config=config)


async def page_oldest(service: Service, db: Database, who: SessionIds) -> object:
    return [one async for one in service.iterate_events(**who._asdict(), page_size=2)]


async def page_newest(service: Service, db: Database, who: SessionIds) -> object:
    names = who._asdict()
    return [one async for one in service.iterate_events(**names, page_size=2, order="newest")]


async def list_user(service: Service, db: Database, who: SessionIds) -> object:
    return await service.list_sessions(app_name=who.app_name, user_id=who.user_id)


async def list_app(service: Service, db: Database, who: SessionIds) -> object:
    return await service.list_sessions(app_name=who.app_name)


async def user_state(service: Service, db: Database, who: SessionIds) -> object:
    return await service.get_user_state(app_name=who.app_name, user_id=who.user_id)


async def append(service: Service, db: Database, who: SessionIds) -> object:
    return await append_delta(service, db.session(who), {"step": 100})


async def append_user_state(service: Service, db: Database, who: SessionIds) -> object:
    return await append_delta(service, db.session(who), {"user:step": 100})


async def append_app_state(service: Service, db: Database, who: SessionIds) -> object:
    return await append_delta(service, db.session(who), {"app:step": 100})


async def append_large(service: Service, db: Database, who: SessionIds) -> object:
    """Change so much state that a new snapshot is written."""
    return await append_delta(service, db.session(who), {"most": "z" * 9000})


async def append_delta(service: Service, session: Session, delta: dict[str, Any]) -> object:
    before = session.model_copy(deep=True)
    try:
        return await service.append_event(session, new_event(100, delta))
    except Exception:
        assert session == before, "a rejected append changed the session object"
        raise


async def delete(service: Service, db: Database, who: SessionIds) -> object:
    await service.delete_session(**who._asdict())
    return "deleted"


async def create_again(service: Service, db: Database, who: SessionIds) -> object:
    return await service.create_session(**who._asdict(), state={"user:a": 1, "app:a": 1})


async def create_another(service: Service, db: Database, who: SessionIds) -> object:
    return await service.create_session(app_name=who.app_name, user_id=who.user_id)


class Impact(NamedTuple):
    """The operations that a kind of attack makes fail, and the sessions that it must not affect."""

    rejected: tuple[Operation, ...]
    unaffected: tuple[SessionIds, ...]


_READS = (get, get_last, get_last_three, get_no_events, get_after, list_user, list_app)
PAGES = (page_oldest, page_newest)
_APPENDS = (append, append_user_state, append_app_state, append_large)


def only(*operations: Operation) -> Impact:
    """These operations; whom else the attack may affect is not checked."""
    return Impact(operations, ())


HISTORY = Impact((get, get_after, *PAGES), (NOTES, BOB, CAROL))
SESSION = Impact((*_READS, *PAGES, *_APPENDS, delete, create_again), (NOTES, BOB, CAROL))
# Pages of events have no state, so they read no snapshot.
SNAPSHOT = SESSION._replace(rejected=tuple(one for one in SESSION.rejected if one not in PAGES))
# A listing relies on the session's own record alone; docs/format.md, "What a reader must check".
SESSION_BY_ID = SESSION._replace(
    rejected=tuple(one for one in SESSION.rejected if one not in (list_user, list_app))
)
USER = Impact((*SESSION.rejected, user_state, create_another), (BOB, CAROL))
APP = Impact((*_READS, append_app_state, create_again, create_another), (CAROL,))
DATABASE = Impact((*USER.rejected,), ())


async def assert_rejected(
    db: Database,
    impact: Impact,
    *errors: type[Exception],
    who: SessionIds = VISIT,
    except_for: tuple[Operation, ...] = (),
) -> None:
    """Every operation of *impact* raises one of *errors* and changes nothing."""
    before = db.dump()
    # The service decides which operation opens which row: on a server, one of each kind is enough.
    operations = one_of_each(impact).rejected if db.replica else ()
    async with db.service() as service:
        with db.watched() as changed:
            for operation in operations or impact.rejected:
                if operation in except_for:
                    continue
                error = await rejection(operation, service, db, who)
                # A session id that is taken stays taken, also if its row is tampered with.
                taken = operation is create_again and isinstance(error, AlreadyExistsError)
                assert taken or type(error) in errors, f"{operation.__name__}: {error!r}"
                if changed():
                    assert db.dump() == before, f"{operation.__name__} changed the database"
    assert db.dump() == before
    # Likewise, one unaffected session is enough there.
    if unaffected := impact.unaffected[-1:] if db.replica else impact.unaffected:
        with db.undone_afterwards():
            await assert_works(db, *unaffected)


def one_of_each(impact: Impact) -> Impact:
    """A read, a listing, and each kind of write: for sweeps over many values."""
    append = append_app_state if impact == APP else append_user_state
    few = (get, list_user, append, delete, create_another)
    return Impact(tuple(one for one in few if one in impact.rejected), ())


async def rejection(
    operation: Operation, service: EncryptedSessionService, db: Database, who: SessionIds
) -> Exception:
    """The error that *operation* raises; fail if there is none, or if it repeats a secret."""
    error = await outcome(operation(service, db, who))
    assert isinstance(error, Exception), f"{operation.__name__} was not rejected: {error!r}"
    assert SECRET not in "".join(texts_of(error)), (
        f"{operation.__name__}: its error repeats a secret"
    )
    return error


async def outcome(attempt: Awaitable[object]) -> object:
    """What *attempt* returns, or the error that it raises."""
    try:
        return await attempt
    except Exception as error:
        return error


async def assert_works(db: Database, *sessions: SessionIds) -> None:
    """The sessions are as they were before the attack, and can be appended to.

    One service that has just started serves all of them: starting it takes longer than its work.
    """
    async with db.service() as service:
        for who in sessions:
            session = db.session(who)
            found = await service.get_session(**who._asdict())
            assert found == session
            await service.append_event(session, new_event(200, {"step": 200}))
            assert await service.get_session(**who._asdict()) == session
            assert await user_state(service, db, who)
            if who.user_id != VISIT.user_id:  # her listing may be rejected for another session
                listing = await service.list_sessions(app_name=who.app_name, user_id=who.user_id)
                assert [session.id for session in listing.sessions] == [who.session_id]


def texts_of(error: BaseException) -> list[str]:
    """The texts and attributes of an error, its causes and its contexts."""
    texts = []
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        texts += [str(one), repr(one), repr(one.args), repr(vars(one))]
        texts += getattr(one, "__notes__", [])
        left += [one.__cause__, one.__context__, getattr(one, "orig", None)]
    return texts
