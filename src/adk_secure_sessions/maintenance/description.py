"""Describing a database to a person, who then confirms that it is the right one."""

from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.db.dialects import dialect_of


class Description(NamedTuple):
    """What identifies a database to a person.

    Attributes:
        server: The host and the port in the URL; None for a SQLite file.
        name: The name of the database on the server, or the absolute path of the SQLite file.
        sessions: The number of sessions.
        updated_at: When a session was last updated, in microseconds since 1970; None if there is no
            session, or if the time cannot be read.
    """

    server: str | None
    name: str
    sessions: int
    updated_at: int | None


def describe(
    connection: sa.Connection, table: sa.FromClause | None, updated_at: str, *where: Any
) -> Description:
    """Describe the database of *connection*, which has its sessions in *table*.

    *updated_at* is the name of the column with the times, and *where* are conditions on the rows.
    The attribute `updated_at` of the result is as the database returns it.
    """
    dialect = dialect_of(connection)
    # Ask the server for the name: a pooler may have another name for the database.
    name = connection.exec_driver_sql(f"SELECT {dialect.current_database}").scalar()
    if isinstance(name, bytes):  # while google-adk's tables are read, SQLite returns bytes
        name = name.decode(errors="backslashreplace")
    server = _server(connection.engine.url) if dialect.is_server else None
    number, last = 0, None
    if table is not None:
        query = sa.select(sa.func.count(), sa.func.max(table.c[updated_at])).select_from(table)
        ((number, last),) = connection.execute(query.where(*where))
    return Description(server, name or "", number, last)


def _server(url: sa.URL) -> str:
    """Return the host and the port of *url*, or all hosts if there are several."""
    hosts = url.query.get("host") or url.query.get("unix_socket") or url.host or "localhost"
    port = "" if url.port is None else f":{url.port}"
    return ", ".join([hosts] if isinstance(hosts, str) else hosts) + port
