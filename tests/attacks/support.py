"""An attacker's hands on the database, and what must follow from what they do."""

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
from adk_secure_sessions.maintenance import Database as Maintained
from tests.attacks.replica import Replica
from tests.attacks.world import (
    BACKENDS,
    BOB,
    CAROL,
    NOTES,
    SECRET,
    START,
    VISIT,
    Who,
    World,
    build_world,
    new_event,
)

# A record of another owner names a key that its new place's owner does not have; whether it is
# known as somebody else's depends on what the process read before.
MISPLACED = (TamperedError, UnknownKeyError)

Dump = dict[str, list[tuple[Any, ...]]]


class Database:
    """A copy of the world, to be changed behind the service's back.

    It is changed as a SQLite file, by SQLite's SQL.  Where there is a *replica*, that is what the
    service has, and the file follows what happens there.
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
        self._become(self.world.files[1])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Undo afterwards what the service did to the rows."""
        if self.replica:
            self.replica.pull(self.path)
        before = self.path.read_bytes()
        yield
        self._become(before)

    def _become(self, content: bytes) -> None:
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        self.path.write_bytes(content)
        if self.replica:
            self.replica.push(self.path, anyhow=True)

    @asynccontextmanager
    async def service(
        self, backend: EncryptionBackend | None = None, **options: Any
    ) -> AsyncIterator[EncryptedSessionService]:
        """A service that has just started."""
        backend = backend or self.backend()
        async with (
            self._place() as place,
            EncryptedSessionService(**place, backend=backend, **options) as service,
        ):
            yield service

    @asynccontextmanager
    async def maintained(self) -> AsyncIterator[Maintained]:
        async with self._place() as place, Maintained(**place, backend=self.backend()) as opened:
            yield opened

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[dict[str, Any]]:
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
        """What is done to the file has reached the service's database at the end."""
        if self.replica:
            self.replica.pull(self.path)
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = OFF")
            yield connection
        if self.replica:
            self.replica.push(self.path)

    def define(self, *statements: str) -> None:
        """Change the tables themselves, in SQL that every database knows."""
        if self.replica:
            self.replica.define(*statements)
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            for statement in statements:
                connection.execute(statement)

    def run(self, sql: str, **values: object) -> None:
        """Change the database; an attack that meets no row would prove nothing."""
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
        """Keep the rows and the columns, but no type (in SQLite), no key and no NOT NULL."""
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
        """Tells whether anything may have changed, for less than a dump costs."""
        if self.replica:
            yield self.replica.has_changed
            return
        with closing(sqlite3.connect(self.path)) as watch:
            version = watch.execute("PRAGMA data_version").fetchone()
            yield lambda: watch.execute("PRAGMA data_version").fetchone() != version

    def older(self, directory: Path) -> "Older":
        """The database as it was before each session's last two events."""
        path = directory / "older.db"
        path.write_bytes(self.world.files[0])
        return Older(path, self)

    def held(self, who: Who) -> Session:
        """The session as its owner holds it from before the attack."""
        return self.world.held[who].model_copy(deep=True)


class Older(NamedTuple):
    path: Path
    database: Database

    def put_back(self, table: str, where: str) -> None:
        """Replace one row by what it once was."""
        shutil.copy(self.path, self.path.with_suffix(".copy"))
        with self.database.connect() as connection:
            connection.execute("ATTACH ? AS past", (str(self.path.with_suffix(".copy")),))
            rows = connection.execute(
                f"SELECT * FROM past.{table} WHERE {where}", self.database.world.rows
            ).fetchall()
            assert len(rows) == 1
            slots = ", ".join("?" * len(rows[0]))
            connection.execute(f"REPLACE INTO main.{table} VALUES ({slots})", rows[0])


def dump(path: Path) -> Dump:
    """All rows of all tables; TEXT stays apart from BLOB, whatever bytes it is made of."""
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        names = sorted(name for (name,) in tables)
        connection.text_factory = lambda raw: f"text {raw!r}"
        return {name: connection.execute(f'SELECT * FROM "{name}"').fetchall() for name in names}


# --- what an application does -----------------------------------------------------------------

Operation = Callable[[EncryptedSessionService, Database, Who], Awaitable[object]]


async def get(service: EncryptedSessionService, db: Database, who: Who) -> object:
    return await service.get_session(**who._asdict())


async def get_last(service: EncryptedSessionService, db: Database, who: Who) -> object:
    return await service.get_session(**who._asdict(), config=GetSessionConfig(num_recent_events=1))


async def get_last_three(service: EncryptedSessionService, db: Database, who: Who) -> object:
    return await service.get_session(**who._asdict(), config=GetSessionConfig(num_recent_events=3))


async def get_no_events(service: EncryptedSessionService, db: Database, who: Who) -> object:
    return await service.get_session(**who._asdict(), config=GetSessionConfig(num_recent_events=0))


async def get_after(service: EncryptedSessionService, db: Database, who: Who) -> object:
    """After the last: those that are left out must be authentic, too."""
    return await service.get_session(
        **who._asdict(), config=GetSessionConfig(after_timestamp=START + 1000)
    )


async def list_user(service: EncryptedSessionService, db: Database, who: Who) -> object:
    return await service.list_sessions(app_name=who.app_name, user_id=who.user_id)


async def list_app(service: EncryptedSessionService, db: Database, who: Who) -> object:
    return await service.list_sessions(app_name=who.app_name)


async def user_state(service: EncryptedSessionService, db: Database, who: Who) -> object:
    return await service.get_user_state(app_name=who.app_name, user_id=who.user_id)


async def append(service: EncryptedSessionService, db: Database, who: Who) -> object:
    return await append_delta(service, db.held(who), {"step": 100})


async def append_user_state(service: EncryptedSessionService, db: Database, who: Who) -> object:
    return await append_delta(service, db.held(who), {"user:step": 100})


async def append_app_state(service: EncryptedSessionService, db: Database, who: Who) -> object:
    return await append_delta(service, db.held(who), {"app:step": 100})


async def append_large(service: EncryptedSessionService, db: Database, who: Who) -> object:
    """Enough for a new base."""
    return await append_delta(service, db.held(who), {"most": "z" * 9000})


async def append_delta(
    service: EncryptedSessionService, session: Session, delta: dict[str, Any]
) -> object:
    before = session.model_copy(deep=True)
    try:
        return await service.append_event(session, new_event(100, delta))
    except Exception:
        assert session == before, "a refused append changed the session in memory"
        raise


async def delete(service: EncryptedSessionService, db: Database, who: Who) -> object:
    await service.delete_session(**who._asdict())
    return "deleted"


async def create_again(service: EncryptedSessionService, db: Database, who: Who) -> object:
    return await service.create_session(**who._asdict(), state={"user:a": 1, "app:a": 1})


async def create_another(service: EncryptedSessionService, db: Database, who: Who) -> object:
    return await service.create_session(app_name=who.app_name, user_id=who.user_id)


class Level(NamedTuple):
    """What an attack on one kind of row must stop, and whom it must leave alone."""

    refused: tuple[Operation, ...]
    unharmed: tuple[Who, ...]


_READS = (get, get_last, get_last_three, get_no_events, get_after, list_user, list_app)
_APPENDS = (append, append_user_state, append_app_state, append_large)

HISTORY = Level((get, get_after), (NOTES, BOB, CAROL))
SESSION = Level((*_READS, *_APPENDS, delete, create_again), (NOTES, BOB, CAROL))
# A listing relies on a session's own seal alone; docs/format.md, "What a reader must check".
SESSION_BY_ID = SESSION._replace(
    refused=tuple(one for one in SESSION.refused if one not in (list_user, list_app))
)
USER = Level((*SESSION.refused, user_state, create_another), (BOB, CAROL))
APP = Level((*_READS, append_app_state, create_again, create_another), (CAROL,))
DATABASE = Level((*USER.refused,), ())


async def assert_refused(
    db: Database,
    level: Level,
    *errors: type[Exception],
    who: Who = VISIT,
    but: tuple[Operation, ...] = (),
) -> None:
    """Each operation, *but* some, is refused with one of *errors*, and changes nothing."""
    before = db.dump()
    # Which operation opens which row is not the server's doing: there, one of each kind.
    operations = one_of_each(level) if db.replica else level
    async with db.service() as service:
        with db.watched() as changed:
            for operation in operations.refused:
                if operation in but:
                    continue
                error = await refusal(operation, service, db, who)
                # A session id that is taken is taken, whatever the row is like.
                taken = operation is create_again and isinstance(error, AlreadyExistsError)
                assert taken or type(error) in errors, f"{operation.__name__}: {error!r}"
                if changed():
                    assert db.dump() == before, f"{operation.__name__} changed the database"
    assert db.dump() == before
    with db.kept():
        # Which row harms whom is not the server's doing: there, one is enough.
        for one in level.unharmed[-1:] if db.replica else level.unharmed:
            await assert_works(db, one)


def one_of_each(level: Level) -> Level:
    """A read, a listing, and each kind of write: for sweeps over many values."""
    append = append_app_state if level == APP else append_user_state
    few = (get, list_user, append, delete, create_another)
    return Level(tuple(one for one in few if one in level.refused), ())


async def refusal(
    operation: Operation, service: EncryptedSessionService, db: Database, who: Who
) -> Exception:
    """The error that *operation* raises; it repeats no secret."""
    error = await outcome(operation(service, db, who))
    assert isinstance(error, Exception), f"{operation.__name__} was not refused: {error!r}"
    assert SECRET not in "".join(texts_of(error)), (
        f"{operation.__name__}: its error repeats a secret"
    )
    return error


async def outcome(attempt: Awaitable[object]) -> object:
    """What it returns, or what it raises."""
    try:
        return await attempt
    except Exception as error:
        return error


async def assert_works(db: Database, who: Who) -> None:
    """*who* finds what was left there, and can go on."""
    held = db.held(who)
    async with db.service() as service:
        found = await service.get_session(**who._asdict())
        assert found == held
        await service.append_event(held, new_event(200, {"step": 200}))
        assert await service.get_session(**who._asdict()) == held
        assert await user_state(service, db, who)
        if who.user_id != VISIT.user_id:  # her listing may be refused for another session
            listing = await service.list_sessions(app_name=who.app_name, user_id=who.user_id)
            assert [session.id for session in listing.sessions] == [who.session_id]


def texts_of(error: BaseException) -> list[str]:
    """What an error, its causes and its contexts say and carry."""
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
