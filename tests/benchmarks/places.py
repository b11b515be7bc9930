"""Where services are compared: on SQLite, on PostgreSQL, and on PostgreSQL further away."""

import tempfile
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from google.adk.sessions import BaseSessionService

from tests.benchmarks.databases import (
    ADK,
    ADK_SQLITE,
    FERNET,
    FLOOR,
    NO_OP,
    OURS,
    Databases,
    opened,
)
from tests.benchmarks.filling import Stock
from tests.benchmarks.slow_line import slow_line

SQLITE, POSTGRESQL, DISTANT = "sqlite", "postgresql", "distant"
NEAR = (SQLITE, POSTGRESQL)  # where it is not about waiting for the server
Sides = dict[str, BaseSessionService]


@dataclass(frozen=True)
class Place:
    """One database for each side, and the services on them."""

    name: str
    databases: Databases
    urls: dict[str, sa.URL]
    all_sides: Sides
    stock: Stock

    @property
    def sides(self) -> Sides:
        """Ours as it is meant to be used, and what it is compared with."""
        others = (FERNET, NO_OP)
        return {side: service for side, service in self.all_sides.items() if side not in others}


class Places:
    """Opens each place when it is first asked for."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._opened: dict[str, Place] = {}

    async def get(self, name: str) -> Place:
        if name not in self._opened:
            make = self._make_distant if name == DISTANT else self._make
            self._opened[name] = await make(name)
        return self._opened[name]

    async def _make(self, kind: str) -> Place:
        # Not pytest's: a socket's path has to be short.
        directory = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-"))
        )
        databases = Databases(kind, self._stack.enter_context(ExitStack()), directory)
        names = [OURS, FERNET, NO_OP, ADK, FLOOR, *([ADK_SQLITE] if kind == SQLITE else [])]
        urls = {name: databases.make() for name in names}
        sides = await self._open(urls)
        return Place(kind, databases, urls, sides, Stock(sides, urls))

    async def _make_distant(self, name: str) -> Place:
        """The databases of the place nearby, where their stock is made, too."""
        near = await self.get(POSTGRESQL)
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="line-")))
        socket = ".s.PGSQL.5432"
        target = Path(str(near.urls[OURS].query["host"])) / socket
        await self._stack.enter_async_context(slow_line(directory / socket, target))
        urls = {
            side: url.update_query_dict({"host": str(directory)})
            for side, url in near.urls.items()
            if side not in (FERNET, NO_OP)
        }
        return Place(name, near.databases, urls, await self._open(urls), near.stock)

    async def _open(self, urls: dict[str, sa.URL]) -> Sides:
        return {
            side: await self._stack.enter_async_context(opened(side, url))
            for side, url in urls.items()
        }
