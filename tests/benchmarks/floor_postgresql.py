"""The floor on PostgreSQL: asyncpg and its pool, one statement for each operation."""

from collections.abc import Sequence
from functools import cache
from typing import Any, Self

import asyncpg  # type: ignore[import-untyped]
import sqlalchemy as sa

from tests.benchmarks.floor import Floor, NewEvent, NewSession, Row

_CONNECTIONS = 10

_INSERT_SESSION = """
WITH app AS (SELECT id, state FROM secure_apps WHERE tag = $1),
 member AS (SELECT id, state FROM secure_users WHERE tag = $2),
 inserted AS (
  INSERT INTO secure_sessions
   (id, user_row, tag, revision, base_revision, created_at, updated_at, expires_at, state)
  SELECT $4, member.id, $3, 0, $5, $6, $6, 9223372036854775807, $7 FROM member),
 base AS (
  INSERT INTO secure_bases (session_row, revision, state)
  SELECT $4, 0, $8 FROM member WHERE $8::bytea IS NOT NULL)
INSERT INTO secure_witnesses (tag, number, seal) SELECT $3, $4, '' FROM member
RETURNING (SELECT state FROM app), (SELECT state FROM member)"""
_INSERT_OWNERS = """
WITH new_app AS (
  INSERT INTO secure_apps (id, tag, app_name, version, state) VALUES ($3, $1, $1, 0, $5)
  ON CONFLICT DO NOTHING RETURNING id),
 app AS (SELECT id FROM new_app UNION ALL SELECT id FROM secure_apps WHERE tag = $1),
 member AS (
  INSERT INTO secure_users (id, app_row, tag, version, state)
  SELECT $4, app.id, $2, 0, $6 FROM app)
INSERT INTO secure_witnesses (tag, number, seal)
SELECT $1::bytea, 0, ''::bytea FROM new_app UNION ALL SELECT $2, 0, ''"""
_INSERT_EVENT = """
WITH updated AS (
  UPDATE secure_sessions SET revision = $2 + 1, updated_at = $3, state = $4
  WHERE id = $1 AND revision = $2 RETURNING id)
INSERT INTO secure_events (session_row, seq, time, event) SELECT id, $2, $3, $5 FROM updated"""
_DELETE = """
WITH deleted AS (DELETE FROM secure_sessions WHERE tag = $1 RETURNING id),
 events AS (DELETE FROM secure_events WHERE session_row = (SELECT id FROM deleted)),
 bases AS (DELETE FROM secure_bases WHERE session_row = (SELECT id FROM deleted))
DELETE FROM secure_witnesses WHERE tag = $1"""


class PostgresFloor(Floor):
    """Create it with `connect`, in the event loop that uses it."""

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self._pool = pool

    @classmethod
    async def connect(cls, url: sa.URL) -> Self:
        dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
        pool = await asyncpg.create_pool(
            dsn, min_size=_CONNECTIONS, max_size=_CONNECTIONS, reset=_no_reset
        )
        return cls(pool)

    async def insert_session(self, new: NewSession) -> None:
        if await self._pool.fetchrow(_INSERT_SESSION, *new) is None:
            rows = (self.next_row(), self.next_row())
            states = (self.encrypt(b"{}"), self.encrypt(b"{}"))
            await self._pool.execute(_INSERT_OWNERS, new.app_tag, new.user_tag, *rows, *states)
            assert await self._pool.fetchrow(_INSERT_SESSION, *new)

    async def insert_event(self, new: NewEvent) -> None:
        assert await self._pool.execute(_INSERT_EVENT, *new) == "INSERT 0 1"

    async def delete(self, tags: tuple[bytes, bytes, bytes]) -> None:
        await self._pool.execute(_DELETE, tags[2])

    async def read(self, query: str, tags: tuple[bytes, ...]) -> Sequence[Row]:
        rows: Sequence[Row] = await self._pool.fetch(_dollar_parameters(query), *tags)
        return rows

    async def close(self) -> None:
        await self._pool.close()


async def _no_reset(_connection: object) -> None:
    """Replace asyncpg's reset of a connection.

    It costs a round trip for each operation, and the statements here leave nothing to reset.
    """


@cache
def _dollar_parameters(query: str) -> str:
    return query.replace("?", "$")
