"""A database and its key database, as a `Pair` of URLs.

`pair` (conftest.py) runs a test on several kinds of the two, `files` on two SQLite files.
`service` and `maintained` open both together.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from google.adk.sessions import Session

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.maintenance import Database
from tests.attacks.support import dump
from tests.faults import Point, with_faults
from tests.maintenance.support import APP, query
from tests.servers import Server, for_service

KEY, OTHER = bytes(range(32)), bytes(range(32, 64))


class Pair(NamedTuple):
    """The URL of the data and that of its keys, for plain SQL behind the services' backs."""

    data: sa.URL
    keys: sa.URL

    @property
    def urls(self) -> dict[str, Any]:
        """Arguments of a service."""
        return {"db_url": for_service(self.data), "key_db_url": for_service(self.keys)}

    def service(self, key: bytes = KEY, **options: Any) -> EncryptedSessionService:
        return EncryptedSessionService(**self.urls, backend=AesGcmBackend(key), **options)

    def maintained(self, key: bytes | None = KEY) -> Database:
        return Database(**self.urls, backend=None if key is None else AesGcmBackend(key))

    def owners(self) -> int:
        """How many apps and users have a row."""
        return sum(count(self.data, table) for table in ("secure_apps", "secure_users"))


def pair_in(directory: Path, name: str = "") -> Pair:
    """Two SQLite files."""
    data, keys = (f"{directory}/{name}{part}.db" for part in ("data", "keys"))
    return Pair(sa.URL.create("sqlite", database=data), sa.URL.create("sqlite", database=keys))


@contextmanager
def empty_pair(request: pytest.FixtureRequest, directory: Path) -> Iterator[Pair]:
    """Two empty databases of the kinds in the parameter of *request*, such as "sqlite mariadb"."""
    with ExitStack() as stack:

        def place(kind: str, name: str) -> sa.URL:
            if kind == "sqlite":
                return sa.URL.create("sqlite", database=f"{directory}/{name}.db")
            server: Server = request.getfixturevalue(kind)
            return stack.enter_context(server.database())

        data, keys = request.param.split()
        yield Pair(place(data, "data"), place(keys, "keys"))


def count(place: sa.URL, table: str) -> int:
    ((number,),) = query(place, f"SELECT count(*) FROM {table}")
    return int(number)


def marks(place: sa.URL) -> dict[str, str]:
    return {row[0]: row[1] for row in query(place, "SELECT name, value FROM secure_meta")}


def tables(place: sa.URL) -> set[str]:
    engine = sa.create_engine(place)
    names = set(sa.inspect(engine).get_table_names())
    engine.dispose()
    return names


def everything(*places: sa.URL) -> object:
    """All rows of SQLite files; None for a file that does not exist."""
    files = [Path(place.database or "") for place in places]
    return [dump(file) if file.exists() else None for file in files]


async def create(
    service: EncryptedSessionService,
    user: str = "ada",
    name: str = "s",
    state: dict[str, Any] | None = None,
) -> Session:
    return await service.create_session(
        app_name=APP, user_id=user, session_id=name, state={"n": 0} | (state or {})
    )


async def find(
    service: EncryptedSessionService, user: str = "ada", name: str = "s"
) -> Session | None:
    return await service.get_session(app_name=APP, user_id=user, session_id=name)


class Killed(BaseException):
    """Ends a call as a signal would: nothing catches it."""


async def store_only_keys(pair: Pair, user: str) -> None:
    """Two services store a key for a new user, and end before they store the user's row."""
    for _ in range(2):
        service, faults = with_faults(pair.service)
        async with service:
            faults.keys.after(Point.WRITE, Killed())
            with pytest.raises(Killed):
                await create(service, user)


async def make_ada_with_spare_keys(pair: Pair) -> None:
    """Ada's row names the first of her three data keys."""
    async with pair.service() as service:
        await create(service, "bob")
    service, faults = with_faults(pair.service)
    async with service:
        # The first WRITE finds that a data key is needed.  The second one follows the data key.
        faults.data.before(Point.WRITE, lambda: store_only_keys(pair, "ada"), nth=2)
        await create(service)
