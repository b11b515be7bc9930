"""Authentic rows in a place where no attack on a real database has put them.

The tag of a row is part of the context of its record, so a row that was moved is rejected when its
record is decrypted.  These tests reach the checks behind: of rows that are authentic by themselves.
"""

import pytest

from adk_secure_sessions.errors import Reason, TamperedError
from adk_secure_sessions.storage import sealed_rows
from adk_secure_sessions.storage.queries import QueryRows
from adk_secure_sessions.storage.reads import ListSessions
from adk_secure_sessions.storage.row_cache import CachedEvents, RowCache
from adk_secure_sessions.storage.schema import UserRow
from adk_secure_sessions.storage.writes import CreateSession, OwnerChanges
from tests.storage.support import APP, BLOB, EVENT, SESSION, USER, WHO, WITNESS, Stored, owner_row


def test_row_of_another_tag_is_not_the_requested_one() -> None:
    stored = Stored()
    rows, attempt = QueryRows(stored.rows()), stored.reading()
    another = attempt._replace(identity=WHO._replace(user_tag=WHO.app_tag, session_tag=WHO.app_tag))
    without_app = QueryRows([row for row in stored.rows() if row[0] != APP])
    with pytest.raises(TamperedError, match="not the requested user") as rejected:
        sealed_rows.open_user(another, without_app)
    assert rejected.value.reason is Reason.WRONG_OWNER
    user = sealed_rows.open_user(attempt, rows)
    another = attempt._replace(identity=WHO._replace(session_tag=WHO.app_tag))
    with pytest.raises(TamperedError, match="not the requested session") as rejected:
        sealed_rows.open_session(another, rows, user)
    assert rejected.value.reason is Reason.WRONG_OWNER
    with pytest.raises(TamperedError, match="its user's row was removed"):
        sealed_rows.open_session(attempt, rows, None)


@pytest.mark.parametrize("of_app", [False, True])
async def test_session_that_is_stored_twice_is_listed_once(
    of_app: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Possible in a table that was rebuilt without its keys."""
    stored = Stored()
    rows = [row for row in stored.rows() if row[0] != EVENT]
    twice = [*rows, *(row for row in rows if row[0] == SESSION)]
    with pytest.raises(TamperedError, match="secure_sessions row 3: it is stored twice"):
        await ListSessions(WHO, of_app=of_app, skips_unreadable=False).execute(
            stored.reading(twice)
        )
    listed = await ListSessions(WHO, of_app=of_app, skips_unreadable=True).execute(
        stored.reading(twice)
    )
    assert [one.session.row.id for one in listed] == [3]
    assert len(caplog.records) == 1


async def test_session_of_a_user_who_is_not_in_the_listing_is_rejected() -> None:
    stored = Stored()
    rows = [(*row[:2], 99, *row[3:]) if row[0] == SESSION else row for row in stored.rows()]
    listed = [row for row in rows if row[0] != EVENT]
    with pytest.raises(TamperedError, match="its user's row was removed"):
        await ListSessions(WHO, of_app=True, skips_unreadable=False).execute(stored.reading(listed))


def test_user_of_another_apps_row_gets_no_session() -> None:
    """An attacker who can write may have changed which row the app's name leads to."""
    stored = Stored()
    rows = [
        row
        for row in stored.rows()
        if row[0] not in (USER, EVENT, SESSION)
        and not (row[0] == WITNESS and row[BLOB] == WHO.session_tag)
    ]
    rows.append(
        owner_row(stored.sealing, stored.user._replace(row=UserRow(2, 99, WHO.user_tag, 7, b"")))
    )
    attempt = stored.reading()
    steps = CreateSession(WHO, {}, {}, b"{}", 500).steps(attempt, OwnerChanges(attempt))
    next(steps)
    with pytest.raises(TamperedError, match="its app's row was removed"):
        steps.send(rows)


def test_history_larger_than_the_cache_is_not_kept() -> None:
    cache = RowCache(1, 10)
    cache.put_events(b"tag", CachedEvents(1, b"", [], []).extended(b"link", [100], ["event"], 11))
    assert cache.events.get(b"tag") is None
