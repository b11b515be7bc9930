"""Checkpoints: what is stored of a rotation that has not ended, and where it is reported."""

import asyncio
import sqlite3
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend, TamperedError
from adk_secure_sessions.maintenance import Database, rotate_data, rotate_master, status
from tests.format_reader import Database as Reader
from tests.maintenance.support import OLD, ROTATIONS, fill, interrupt, run_sql

AES = AesGcmBackend(OLD)


@pytest.mark.parametrize("name", ROTATIONS)
async def test_checkpoint_is_stored_as_the_format_says(
    name: str, file_url: str, tmp_path: Any
) -> None:
    await fill(file_url, AES)
    await interrupt(file_url, ROTATIONS[name])
    async with Database(file_url, AES) as db:
        (unfinished,) = (await status(db)).unfinished
    with closing(sqlite3.connect(tmp_path / "sessions.db")) as connection:
        assert Reader(connection, OLD).checkpoints() == {f"rotation.{name}": (unfinished.since,)}


@pytest.mark.parametrize("place", ["sqlite", "mariadb"], indirect=True)
async def test_checkpoint_that_an_attacker_hides_stops_no_rotation_for_ever(
    url: str, place: sa.URL
) -> None:
    await fill(url, AES)
    junk = ", ".join(f"('{number}', 'x')" for number in range(120))
    run_sql(place, f"INSERT INTO secure_meta VALUES {junk}, ('ROTATION.MASTER', 'x')")
    await interrupt(url, rotate_data)
    async with Database(url, AES) as db:
        assert [one.name for one in (await status(db)).unfinished] == ["data"]
        assert (await asyncio.wait_for(rotate_data(db), 60)).resumed
        # MariaDB does not distinguish the case of names.
        if place.get_backend_name() != "sqlite":
            with pytest.raises(TamperedError, match="the checkpoint was modified"):
                await asyncio.wait_for(rotate_master(db), 60)
