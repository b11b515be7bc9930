"""Databases with few and with very many users, for each deployment."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import sqlalchemy as sa
from google.adk.sessions import BaseSessionService

from tests.benchmarks.databases import ADK, OURS, opened, update_statistics
from tests.benchmarks.deployments import Deployment
from tests.benchmarks.plan import FEW_USERS, MANY_USERS
from tests.benchmarks.seeding import seed_users


@dataclass(frozen=True)
class DatabasesByUsers:
    """Databases by side and number of users; each user has one session, "only"."""

    urls: dict[tuple[str, int], sa.URL]

    @asynccontextmanager
    async def open(self, users: int, side: str = OURS) -> AsyncIterator[BaseSessionService]:
        async with opened(side, self.urls[side, users]) as service:
            yield service


class DatabasesByUsersCache:
    """Fills the databases of a deployment at their first use and keeps them."""

    def __init__(self) -> None:
        self._made: dict[str, DatabasesByUsers] = {}

    async def get(self, deployment: Deployment) -> DatabasesByUsers:
        if deployment.name not in self._made:
            urls = {}
            for side in (OURS, ADK):
                for users in (FEW_USERS, MANY_USERS):
                    url = urls[side, users] = deployment.databases.create()
                    async with opened(side, url) as service:
                        await seed_users(service, users)
                    await update_statistics(url)
            self._made[deployment.name] = DatabasesByUsers(urls)
        return self._made[deployment.name]
