"""Databases with few and with very many users, on each place, made when first asked for."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import sqlalchemy as sa
from google.adk.sessions import BaseSessionService

from tests.benchmarks.databases import ADK, OURS, opened, settled
from tests.benchmarks.filling import fill_users
from tests.benchmarks.places import Place
from tests.benchmarks.plan import FEW, MANY


@dataclass(frozen=True)
class Crowd:
    """The databases by side and by how many users they hold, each with one session, "only"."""

    urls: dict[tuple[str, int], sa.URL]

    @asynccontextmanager
    async def open(self, users: int, side: str = OURS) -> AsyncIterator[BaseSessionService]:
        async with opened(side, self.urls[side, users]) as service:
            yield service


class Crowds:
    def __init__(self) -> None:
        self._made: dict[str, Crowd] = {}

    async def get(self, place: Place) -> Crowd:
        if place.name not in self._made:
            urls = {}
            for side in (OURS, ADK):
                for users in (FEW, MANY):
                    url = urls[side, users] = place.databases.make()
                    async with opened(side, url) as service:
                        await fill_users(service, users)
                    await settled(url)
            self._made[place.name] = Crowd(urls)
        return self._made[place.name]
