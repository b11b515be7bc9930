"""Operations that compare the rows of `secure_state_index` with the states, and correct them."""

from collections.abc import Collection

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Executors, Steps
from adk_secure_sessions.formats.states import USER_PREFIX, loads
from adk_secure_sessions.storage import bindings
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage.bindings import Attempt, Identity
from adk_secure_sessions.storage.clusters import claim_session, claim_user
from adk_secure_sessions.storage.features import search_index
from adk_secure_sessions.storage.features.search_index import Differences
from adk_secure_sessions.storage.owner_changes import OwnerChanges
from adk_secure_sessions.storage.queries import Found
from adk_secure_sessions.storage.reads import ReadOperation
from adk_secure_sessions.storage.writes import Write, apply_changes, read_found


class CheckIndexed(ReadOperation):
    """Compare the rows of a session, or of a user, with the state.

    `attempt` returns the row id in `secure_state_index` and the differences; None if the session
    or the user does not exist.

    Args:
        who: The ids of the session.
        keys: The tags of the keys to compare.
        of_user: Whether to compare the rows of the user, and not those of the session.
    """

    reads_keys = True

    def __init__(self, who: Identity, keys: Collection[bytes], *, of_user: bool) -> None:
        super().__init__(who)
        self._keys = frozenset(keys)
        self._of_user = of_user

    async def attempt(
        self, attempt: Attempt, executors: Executors
    ) -> tuple[int, Differences] | None:
        forms = sql.INDEXED_USER if self._of_user else sql.INDEXED_SESSION
        found = await self._read(attempt, executors, forms)
        return _differences(attempt, found, self._keys, of_user=self._of_user)


class CorrectIndexed(Write[int]):
    """Correct the rows of a session, or of a user, and return the number of changed rows.

    The arguments are those of `CheckIndexed`.
    """

    change = "index"

    def __init__(self, who: Identity, keys: Collection[bytes], *, of_user: bool) -> None:
        super().__init__(who)
        self._keys = frozenset(keys)
        self._of_user = of_user

    async def attempt(self, attempt: Attempt, executors: Executors) -> int:
        # No other transaction may change the state between the read and the changes.
        return await super().attempt(attempt._replace(locks_rows=True), executors)

    def contended(self) -> list[sa.Executable]:
        return [sql.LOCK_USER] if self._of_user else [sql.LOCK_SESSION]

    def steps(self, attempt: Attempt, owners: OwnerChanges) -> Steps[int]:
        forms = sql.INDEXED_USER if self._of_user else sql.INDEXED_SESSION
        found = yield from read_found(attempt, forms)
        compared = _differences(attempt, found, self._keys, of_user=self._of_user)
        if compared is None or not compared[1].total:
            return 0
        row_id, differences = compared
        first, *rest = differences.changes(row_id)
        # On a cluster, the lock of the row is known to one node only.
        who = attempt.who
        claim = claim_user(who.user_tag) if self._of_user else claim_session(who.session_tag)
        yield from apply_changes([*claim, first, *rest])
        return differences.total


def _differences(
    attempt: Attempt, found: Found, keys: frozenset[bytes], *, of_user: bool
) -> tuple[int, Differences] | None:
    user = bindings.open_user(attempt, found)
    if of_user:
        if user is None:
            return None
        row_id = search_index.row_of_user(user.id)
        right = search_index.entries(attempt, USER_PREFIX, loads(user.state), keys)
    else:
        session = bindings.open_session(attempt, found, user)
        if session is None:
            return None
        row_id = session.id
        right = search_index.entries(attempt, "", search_index.state_of(session), keys)
    return row_id, Differences.between(found.indexed, right, keys)
