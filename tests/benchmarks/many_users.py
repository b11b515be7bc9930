"""Databases with few and with very many users, for each deployment."""

import sqlalchemy as sa

from tests.benchmarks.databases import OURS, opened, update_statistics
from tests.benchmarks.deployments import Deployment
from tests.benchmarks.seeding import seed_users


class DatabasesByUsers:
    """Fills databases at their first use, and keeps them; each user has one session, "only"."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str, int], sa.URL] = {}

    async def url(self, deployment: Deployment, users: int, side: str = OURS) -> sa.URL:
        key = deployment.name, side, users
        if key not in self._made:
            url = self._made[key] = deployment.databases.create()
            async with opened(side, url) as service:
                await seed_users(service, users)
            await update_statistics(url)
        return self._made[key]
