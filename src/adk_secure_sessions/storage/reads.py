"""What callers get to see of the rows that were read."""

import logging
from typing import NamedTuple

from adk_secure_sessions.errors import (
    DecryptionError,
    Reason,
    TamperedError,
)
from adk_secure_sessions.storage import bindings as seals
from adk_secure_sessions.storage.rows import Context, Found, Owner, StoredSession
from adk_secure_sessions.storage.schema import sessions, users

logger = logging.getLogger(__name__)


class View(NamedTuple):
    """A session and the states that its callers see with it."""

    session: StoredSession
    user_id: str
    app_state: bytes
    user_state: bytes


def view_of(session: StoredSession, user: Owner, app: Owner | None) -> View:
    """Join the three.  Raises TamperedError if they do not belong together."""
    if app is None or user.app_row != app.id:
        raise TamperedError(
            "its app's row was removed", reason=Reason.MISSING, table=users.name, row=user.id
        )
    return View(session, user.user_id, app.state, user.state)


def listed(
    context: Context, found: Found, app: Owner | None, owners: list[Owner], *, skip: bool
) -> list[View]:
    """All sessions that were found, of *owners*; *skip* as for `is_skipped`."""
    by_row = {user.id: user for user in owners}
    views = []
    for row in found.sessions:
        user = by_row.get(row[2])
        try:
            if user is None:
                raise TamperedError(
                    "its user's row was removed or cannot be decrypted",
                    reason=Reason.MISSING,
                    table=sessions.name,
                    row=row[1],
                )
            views.append(view_of(seals.open_listed_session(context, found, user, row), user, app))
        except DecryptionError as error:
            if not is_skipped(error, skip=skip):
                raise
    return views


def is_skipped(error: DecryptionError, *, skip: bool) -> bool:
    """Whether to leave out what cannot be opened, which is then logged."""
    if skip:
        logger.error("left out of a listing: %s", error)
    return skip
