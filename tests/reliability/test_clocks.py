"""A running service whose clock jumps, in both directions, between and during its operations.

`maintenance/test_clocks.py` has the same for the commands.
"""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from google.adk.events import Event, EventActions

from adk_secure_sessions import (
    AesGcmBackend,
    Caches,
    DecryptionError,
    EncryptedSessionService,
    maintenance,
)
from tests.clocks import shifted
from tests.conformance.support import create, find, listed, rejected_as_stale, reload
from tests.drivers import each_driver, server, url
from tests.reliability.results import Record, database_of
from tests.sqlite_files import execute

__all__ = ["server", "url"]

name = each_driver("sqlite", soak=["asyncpg", "asyncmy"])
KEY = bytes(range(32))
JUMPS = (0, 400, -400, 1, -1, 0.0001, -0.0001, 10_000, -10_000)  # days


def now_event(number: int) -> Event:
    """An event whose time is that of the clock, as google-adk makes it."""
    delta = {"n": number, "user:n": number}
    return Event(author="agent", invocation_id="i", actions=EventActions(state_delta=delta))


async def test_clock_that_jumps_changes_neither_the_order_nor_the_content(
    url: sa.URL, record: Record
) -> None:
    text = url.render_as_string(hide_password=False)
    async with (
        EncryptedSessionService(text, AesGcmBackend(KEY)) as service,
        EncryptedSessionService(text, AesGcmBackend(KEY)) as other,
    ):
        session = await create(service)
        times, started, found = 0, time.time(), session.model_copy(deep=True)
        older = found
        for number, days in enumerate(JUMPS):
            with shifted(days):
                one = now_event(number)
                assert abs(one.timestamp - started - days * 86400) < 60
                await service.append_event(session, one)
                assert abs(session.last_update_time - one.timestamp) < 0.001
                # Another process, which knows an older revision, reads the newer one.
                older, found = found, await reload(other, session)
                assert found == session
                assert [event.actions.state_delta["n"] for event in found.events] == [
                    *range(number + 1)
                ]
                await create(service, f"s{number}")  # a new user's key has a time, too
                await create(service, user_id=f"u{number}")
                times += 1
        with rejected_as_stale():  # the revisions count, and not the times
            await service.append_event(older, now_event(99))
        assert len(await listed(service)) == 1 + len(JUMPS)
        assert await reload(other, session) == session
    async with maintenance.Database(text, AesGcmBackend(KEY)) as db:
        found_bad = await maintenance.verify(db)
        assert (found_bad.bad, found_bad.unchecked) == (0, 0), found_bad.problems
    record.fault(f"clock jumps/{database_of(url)}", times=times, acknowledged=3 * times + 1)


async def test_lifetime_of_a_session_follows_the_clock_and_a_jump_back_revives_it(
    tmp_path: Path,
) -> None:
    """A time-to-live is a time of the calendar: who sets the clock moves it."""
    url = f"sqlite+aiosqlite:///{tmp_path}/sessions.db"
    async with EncryptedSessionService(
        url, AesGcmBackend(KEY), expires_after=timedelta(days=30)
    ) as service:
        session = await create(service)
        await service.append_event(session, now_event(0))
        with shifted(31):
            assert await find(service, session) is None
        with shifted(-31):
            assert await find(service, session) is not None
        assert await find(service, session) is not None
        with shifted(31):
            async with maintenance.Database(url, AesGcmBackend(KEY)) as db:
                assert (await maintenance.purge_sessions(db)).deleted == 1
        assert await find(service, session) is None


@pytest.mark.parametrize("days", [-400, 400])
async def test_caches_expire_after_elapsed_time_whatever_the_clock_says(
    days: int, tmp_path: Path
) -> None:
    """If they followed the clock, a jump back would keep an erased user's key for a year."""
    url = f"sqlite+aiosqlite:///{tmp_path}/sessions.db"
    async with EncryptedSessionService(
        url, AesGcmBackend(KEY), cache=Caches(seconds=0.5)
    ) as service:
        session = await create(service)
        with shifted(days):
            # Another process erases the user; the rows return without the data key.
            of_users = "owner IN (SELECT tag FROM secure_users)"
            execute(tmp_path / "sessions.db", f"DELETE FROM secure_data_keys WHERE {of_users}")
            assert await find(service, session) == session  # with the key that it has
            time.sleep(0.6)
            with pytest.raises(DecryptionError):
                await find(service, session)
