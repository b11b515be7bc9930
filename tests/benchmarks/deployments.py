"""The deployments to compare on: SQLite, PostgreSQL, and PostgreSQL behind a slow network."""

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
from tests.benchmarks.latency_proxy import latency_proxy
from tests.benchmarks.seeding import SeededSessions

SQLITE, POSTGRESQL, REMOTE = "sqlite", "postgresql", "remote"
LOCAL = (SQLITE, POSTGRESQL)  # for benchmarks in which network latency plays no part
Sides = dict[str, BaseSessionService]


@dataclass(frozen=True)
class Deployment:
    """One database for each side, and an open service on each."""

    name: str
    databases: Databases
    urls: dict[str, sa.URL]
    all_sides: Sides
    seeded: SeededSessions

    @property
    def sides(self) -> Sides:
        """Our service with AES-256-GCM, ADK's services and the floor."""
        others = (FERNET, NO_OP)
        return {side: service for side, service in self.all_sides.items() if side not in others}


class Deployments:
    """Opens each deployment at its first use and keeps it open."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._opened: dict[str, Deployment] = {}

    async def get(self, name: str) -> Deployment:
        if name not in self._opened:
            make = self._make_remote if name == REMOTE else self._make
            self._opened[name] = await make(name)
        return self._opened[name]

    async def _make(self, kind: str) -> Deployment:
        # Not pytest's tmp_path: the path of a Unix socket has a length limit.
        directory = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-"))
        )
        databases = Databases(kind, self._stack.enter_context(ExitStack()), directory)
        names = [OURS, FERNET, NO_OP, ADK, FLOOR, *([ADK_SQLITE] if kind == SQLITE else [])]
        urls = {name: databases.create() for name in names}
        sides = await self._open(urls)
        return Deployment(kind, databases, urls, sides, SeededSessions(sides, urls))

    async def _make_remote(self, name: str) -> Deployment:
        """The databases and seeded sessions of the local PostgreSQL, behind the proxy."""
        local = await self.get(POSTGRESQL)
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="proxy-")))
        socket = ".s.PGSQL.5432"
        target = Path(str(local.urls[OURS].query["host"])) / socket
        await self._stack.enter_async_context(latency_proxy(directory / socket, target))
        urls = {
            side: url.update_query_dict({"host": str(directory)})
            for side, url in local.urls.items()
            if side not in (FERNET, NO_OP)
        }
        return Deployment(name, local.databases, urls, await self._open(urls), local.seeded)

    async def _open(self, urls: dict[str, sa.URL]) -> Sides:
        return {
            side: await self._stack.enter_async_context(opened(side, url))
            for side, url in urls.items()
        }
