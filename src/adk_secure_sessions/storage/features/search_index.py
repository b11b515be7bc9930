"""The search index: which keys are indexed, searches, and correcting the rows."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import MAX_CONFLICTS, Read, Steps
from adk_secure_sessions.errors import ConfigurationError, DecryptionError
from adk_secure_sessions.formats.json_text import USER_PREFIX, canonical_json, load_state
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage import sealed_rows
from adk_secure_sessions.storage.feature_list import Feature
from adk_secure_sessions.storage.features import index_rows
from adk_secure_sessions.storage.features.index_rows import Differences, IndexState
from adk_secure_sessions.storage.operation_runner import (
    Attempt,
    OperationRunner,
    StorageOperation,
    apply_or_conflict,
)
from adk_secure_sessions.storage.queries import QueryRows
from adk_secure_sessions.storage.reads import (
    ListSessionsPage,
    PageOptions,
    SessionPosition,
    StoredSessionPage,
)
from adk_secure_sessions.storage.schema import Identity, SessionWithStates
from adk_secure_sessions.storage.survey import FeatureName
from adk_secure_sessions.storage.writes import OwnerChanges, Write, read_rows


class SearchIndex:
    """The search index of a database.

    *keys* of the state are indexed for each app to which this process writes.
    """

    def __init__(self, runner: OperationRunner, keys: Sequence[str] = ()) -> None:
        if isinstance(keys, str):
            raise ConfigurationError("indexed_state_keys must be a sequence of keys, not one text")
        self.state_keys: tuple[str, ...] = tuple(keys)
        for key in self.state_keys:
            index_rows.check_state_key(key)
        self._runner = runner
        self._feature = Feature(runner, FeatureName.STATE_INDEX)
        # The apps whose keys were declared, by the keyring that was current then.
        self._declared: WeakKeyDictionary[Keyring, set[str]] = WeakKeyDictionary()

    async def find(
        self, app_name: str, key: str, value: object, options: PageOptions
    ) -> StoredSessionPage:
        """Return a page of the sessions of an app whose state contains *key* with *value*, JSON.

        *key* is a key of the session's state, or `user:` and a key of the user's state.
        """
        index_rows.check_state_key(key)
        identity = await self._runner.identify(app_name)
        page = FindSessionsPage(identity, options, await self._runner.keyring(), key, value)
        is_configured = key in self.state_keys  # then, perhaps the app has no sessions yet
        for declares in (False, True) if is_configured else (False,):
            if declares:
                await self.declare_configured(app_name)
            if await self._feature.is_added():
                try:
                    return await self._runner.run(page)
                except NotIndexed:
                    pass
        raise ConfigurationError(
            f"the search index of the state key {key!r} of the app {app_name!r} is not complete: "
            "name the key in indexed_state_keys of all services, restart them, and run "
            "`adk-secure-sessions index fill`"
        )

    async def declare(self, app_name: str, keys: Iterable[str]) -> frozenset[bytes]:
        """Store that *keys* of the state are indexed, and return their tags.

        From now on, this process and each process that opens the database later maintains the rows
        of these keys.  If the app has no sessions yet, it can be searched by these keys at once.
        """
        await self._feature.ensure()
        keyring = await self._runner.keyring()
        tags = frozenset(keyring.index_master.state_key_tag(app_name, key) for key in keys)
        await self._runner.data_db.run_sync(partial(index_rows.declare, keyring, app_name, tags))
        keyring.indexed_key_tags.update(tags)
        return tags

    async def declare_configured(self, app_name: str) -> None:
        """Declare the keys that this process is configured to index, once for each app."""
        if not self.state_keys:
            return
        keyring = await self._runner.keyring()
        declared = self._declared.setdefault(keyring, set())
        if app_name not in declared:
            await self.declare(app_name, self.state_keys)
            declared.add(app_name)


class NotIndexed(Exception):
    """The search index does not have all sessions with the key that a search asks for."""


class FindSessionsPage(ListSessionsPage):
    """Read a page of the sessions of an app whose state contains *key* with *value*, JSON.

    The index is not authenticated, so the state of each session that it lists is compared.
    """

    def __init__(
        self, identity: Identity, options: PageOptions, keyring: Keyring, key: str, value: object
    ) -> None:
        super().__init__(identity, options)
        self._of_users = key.startswith(USER_PREFIX)
        self.found_by: sql.FoundBy | None = "user" if self._of_users else "session"
        self._name = key.removeprefix(USER_PREFIX)
        self._value = canonical_json(value)
        app_name, master = identity.app_name, keyring.index_master
        self._tags = {
            "key_tag": master.state_key_tag(app_name, key),
            "value_tag": master.state_value_tag(app_name, key, self._value),
        }

    def _parameters(self, after: SessionPosition | None, limit: int) -> dict[str, object]:
        return super()._parameters(after, limit) | self._tags

    async def _open_sessions(self, attempt: Attempt, rows: QueryRows) -> list[SessionWithStates]:
        master = attempt.keys.keyring.index_master
        marks = (index_rows.state_of_mark(master, *mark[1:]) for mark in rows.index_rows)
        if IndexState.COMPLETE not in marks:
            raise NotIndexed
        return list(filter(self._matches, await super()._open_sessions(attempt, rows)))

    def _matches(self, stored: SessionWithStates) -> bool:
        """Return whether the state has the value.

        Also True if the state is malformed: the caller then raises the error.
        """
        session = stored.session
        states = (
            [stored.user_state] if self._of_users else [session.overlay, session.snapshot or b"{}"]
        )
        try:
            for state in map(load_state, states):
                if self._name in state:
                    return canonical_json(state[self._name]) == self._value
        except DecryptionError:
            return True
        return False


@dataclass(eq=False, repr=False)
class CheckIndexRows(StorageOperation[tuple[int, Differences] | None]):
    """Compare the rows of a session, or of a user, with the state, for the keys with *key_tags*.

    Return the row id in `secure_state_index` and the differences; None if there is no such session
    or user.
    """

    needs_fresh_keys = True

    key_tags: Collection[bytes]
    of_user: bool

    async def execute(self, attempt: Attempt) -> tuple[int, Differences] | None:
        query = sql.with_index_rows(of_user=self.of_user)
        rows = await attempt.read(query)
        return _differences(attempt, rows, self.key_tags, of_user=self.of_user)


@dataclass(eq=False, repr=False)
class CorrectIndexRows(Write[int]):
    """Correct the rows of a session, or of a user, and return the number of changed rows.

    The arguments are those of `CheckIndexRows`.
    """

    audited_as = "index"
    always_locks_rows = True  # nobody may change the state between the read and the changes
    # An application that writes to a session all the time should not end the command.
    max_conflicts = 10 * MAX_CONFLICTS

    key_tags: Collection[bytes]
    of_user: bool

    def __post_init__(self) -> None:
        query = sql.LOCK_USER if self.of_user else sql.LOCK_SESSION
        self.lock_queries: Sequence[sa.Executable] = (query,)

    def steps(self, attempt: Attempt, owner_changes: OwnerChanges) -> Steps[int]:
        query = sql.with_index_rows(of_user=self.of_user)
        rows = yield from read_rows(attempt, query)
        compared = _differences(attempt, rows, self.key_tags, of_user=self.of_user)
        if compared is None or not compared[1].total:
            return 0
        row_id, differences = compared
        # The row is locked already: on a cluster, this also claims it.
        claim = sql.LOCK_AND_CLAIM_USER if self.of_user else sql.LOCK_AND_CLAIM_SESSION
        yield Read(claim, attempt.identity.tag_parameters())
        yield from apply_or_conflict(differences.changes(row_id))
        return differences.total


def _differences(
    attempt: Attempt, rows: QueryRows, key_tags: Collection[bytes], *, of_user: bool
) -> tuple[int, Differences] | None:
    user = sealed_rows.open_user(attempt, rows)
    if of_user:
        if user is None:
            return None
        row_id = index_rows.index_row_id(user.row.id)
        expected = index_rows.value_tags_of(attempt, USER_PREFIX, load_state(user.state), key_tags)
    else:
        session = sealed_rows.open_session(attempt, rows, user)
        if session is None:
            return None
        row_id = session.row.id
        assert session.snapshot is not None, "the query reads snapshots"
        state = load_state(session.snapshot) | load_state(session.overlay)
        expected = index_rows.value_tags_of(attempt, "", state, key_tags)
    return row_id, Differences.between(rows.index_rows, expected, frozenset(key_tags))
