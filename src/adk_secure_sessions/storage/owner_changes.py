"""Changes of apps and users: their states, their data keys and their version witnesses.

A write operation collects these changes in an `OwnerChanges` object.  The operation applies them
together with its changes of a session, in one request.
"""

from collections.abc import Callable

from adk_secure_sessions.db.protocol import Change
from adk_secure_sessions.errors import Reason, TamperedError, UnknownKeyError
from adk_secure_sessions.formats.records import encode_text, new_link
from adk_secure_sessions.formats.states import USER_PREFIX, JsonObject, dumps, loads
from adk_secure_sessions.storage import bindings
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage.bindings import Attempt, KeySource, NeedsDataKey, Owner
from adk_secure_sessions.storage.clusters import claim_data_key, claim_keyring
from adk_secure_sessions.storage.features import search_index
from adk_secure_sessions.storage.queries import AppRow, Found, UserRow, WitnessRow
from adk_secure_sessions.storage.schema import new_row_key, users


class OwnerChanges:
    """The changes of apps and users that one attempt makes.

    Attributes:
        changes: The changes, in the order in which they must be applied.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.changes: list[Change] = []
        self._attempt = attempt
        self._keys = attempt.keys
        self._after_commit: list[Callable[[], None]] = []

    def cache(self) -> None:
        """Cache the rows that were written; call this after the commit."""
        for put in self._after_commit:
            put()

    def app(
        self, found: Found, app: Owner | None, delta: JsonObject, *, needs_key: bool = False
    ) -> Owner:
        """Merge *delta* into the app's state: add the changes to `changes`, and return the app.

        If *app* is None, add the changes that insert the app's row and its version witness.

        Args:
            found: The rows that this attempt has read.
            app: The decrypted app; None if the app is not stored.
            delta: The entries to add to the app's state.
            needs_key: Also ensure that the app's row names a data key with which this process may
                encrypt new records.
        """
        if app is None:
            who = self._attempt.who
            self._ensure_first_key(who.app_tag)
            key_ids = self._keys.names(who.app_tag, ())
            app = Owner(new_row_key(), who.app_tag, 0, "", 0, dumps(delta), new_link(), key_ids)
            sealed = bindings.seal_app(self._attempt, app)
            row = {"id": app.id, "tag": app.tag, "app_name": encode_text(who.app_name)}
            self.changes.append(Change(sql.INSERT_APP, row | {"version": 0, "state": sealed}))
            self._put_app(app, sealed, self._insert_witness(app))
        elif delta or needs_key:
            assert found.app is not None
            stored = found.app.state
            self._ensure_key(app.tag, stored)
            if delta or not self._names_current_key(app):
                app = self._next_version(app, delta)
                self._update_app(app, stored)
        return app

    def user(self, found: Found, user: Owner | None, app_row: int, delta: JsonObject) -> Owner:
        """Merge *delta* into the user's state: add the changes to `changes`, and return the user.

        If *user* is None, add the changes that insert the user's row and its version witness.  Also
        ensure that the user's row names a data key with which this process may encrypt new records.

        Args:
            found: The rows that this attempt has read.
            user: The decrypted user; None if the user is not stored.
            app_row: The row id of the user's app.
            delta: The entries to add to the user's state.
        """
        if user is None:
            who = self._attempt.who
            self._ensure_first_key(who.user_tag)
            key_ids = self._keys.names(who.user_tag, ())
            user = Owner(
                new_row_key(), who.user_tag, app_row, who.user_id, 0, dumps(delta), new_link(),
                key_ids,
            )  # fmt: skip
            sealed = bindings.seal_user(self._attempt, user)
            row = {"id": user.id, "app_row": app_row, "tag": user.tag}
            self.changes.append(Change(sql.INSERT_USER, row | {"version": 0, "state": sealed}))
            self._put_user(user, sealed, self._insert_witness(user))
            found_entries = search_index.entries(self._attempt, USER_PREFIX, delta)
            self.changes += search_index.insertion(search_index.row_of_user(user.id), found_entries)
            return user
        if user.app_row != app_row:
            raise TamperedError(
                "it belongs to another app's row",
                reason=Reason.WRONG_OWNER,
                table=users.name,
                row=user.id,
            )
        assert found.user is not None
        stored = found.user.state
        self._ensure_key(user.tag, stored, *(row.state for row in found.sessions))
        if delta or not self._names_current_key(user):
            user = self._next_version(user, delta)
            self._update_user(user, stored)
            changed = search_index.entries(self._attempt, USER_PREFIX, delta)
            self.changes += search_index.update(search_index.row_of_user(user.id), changed)
        return user

    def set_state(self, found: Found, owner: Owner, state: bytes) -> Owner:
        """Replace the state of a stored owner by *state*: add the changes to `changes`.

        *owner* is the user of *found*, or the app of *found* if `owner.app_row` is 0.  Return the
        changed owner.
        """
        row = found.user if owner.app_row else found.app
        assert row is not None
        self._ensure_key(owner.tag, row.state)
        changed = self._next_version(owner._replace(state=state), {})
        if owner.app_row:
            self._update_user(changed, row.state)
            self._index_user(owner, state)
        else:
            self._update_app(changed, row.state)
        return changed

    def _index_user(self, user: Owner, state: bytes) -> None:
        """Add the changes of the search index that are due if *state* replaces the user's state."""
        if not self._keys.keyring.indexed_keys:
            return
        old = search_index.entries(self._attempt, USER_PREFIX, loads(user.state))
        new = search_index.entries(self._attempt, USER_PREFIX, loads(state))
        row_id = search_index.row_of_user(user.id)
        self.changes += search_index.update(row_id, new)
        self.changes += search_index.removal(row_id, old.keys() - new.keys())

    def renew_key(self, owner: Owner, stored: bytes, since: int) -> bool:
        """Ensure that the owner's row names only one data key, created at *since* or later.

        If the owner has no such data key, create one.

        Args:
            owner: The decrypted row of an app or a user.
            stored: The record that the row contains; the change requires that it is unchanged.
            since: The earliest time of creation, in microseconds since 1970, UTC.

        Returns:
            True if changes of the owner's row were added; False if the row needs no change.
        """
        if self._keys.created:
            self._keys.adopt(owner.tag, self._keys.created)
        current = self._keys.current(owner.tag)
        is_newest = self._keys.current_is_newest(owner.tag)
        if current is None or current.created_at < since or not is_newest:
            self._new_key(owner.tag, since)
        elif owner.key_ids == (current.id,):
            return False
        owner = self._next_version(owner._replace(key_ids=()), {})
        if owner.user_id or owner.app_row:
            self._update_user(owner, stored)
        else:
            self._update_app(owner, stored)
        return True

    def _names_current_key(self, owner: Owner) -> bool:
        current = self._keys.current(owner.tag)
        return current is not None and current.id in owner.key_ids

    def _next_version(self, owner: Owner, delta: JsonObject) -> Owner:
        state = dumps(loads(owner.state) | delta) if delta else owner.state
        key_ids = self._keys.names(owner.tag, owner.key_ids)
        return owner._replace(
            version=owner.version + 1, state=state, link=new_link(), key_ids=key_ids
        )

    def _update_app(self, app: Owner, stored: bytes) -> None:
        sealed = bindings.seal_app(self._attempt, app)
        row = self._update(app, stored, sealed)
        self.changes.append(Change(sql.UPDATE_APP, row))
        self._put_app(app, sealed, self._update_witness(app))

    def _update_user(self, user: Owner, stored: bytes) -> None:
        sealed = bindings.seal_user(self._attempt, user)
        row = self._update(user, stored, sealed)
        self.changes.append(Change(sql.UPDATE_USER, row))
        self._put_user(user, sealed, self._update_witness(user))

    def _update(self, owner: Owner, stored: bytes, sealed: bytes) -> dict[str, object]:
        row = {"at_id": owner.id, "at_version": owner.version - 1, "at_state": stored}
        return row | {"version": owner.version, "state": sealed}

    def _insert_witness(self, owner: Owner) -> WitnessRow:
        seal = bindings.seal_witness(self._attempt, owner.tag, owner.tag, 0, owner.link)
        witness = WitnessRow(0, owner.tag, seal)
        self.changes.append(Change(sql.INSERT_WITNESS, witness._asdict()))
        return witness

    def _update_witness(self, owner: Owner) -> WitnessRow:
        tag, number = owner.tag, owner.version
        seal = bindings.seal_witness(self._attempt, tag, tag, number, owner.link)
        row = {"at_tag": tag, "at_number": number - 1, "number": number, "seal": seal}
        self.changes.append(Change(sql.UPDATE_WITNESS, row))
        return WitnessRow(number, tag, seal)

    def _put_app(self, app: Owner, sealed: bytes, witness: WitnessRow) -> None:
        cache = self._attempt.cache
        row = AppRow(app.id, app.version, encode_text(self._attempt.who.app_name), sealed)
        self._after_commit.append(lambda: cache.put(cache.apps, row, witness, app))

    def _put_user(self, user: Owner, sealed: bytes, witness: WitnessRow) -> None:
        cache = self._attempt.cache
        row = UserRow(user.id, user.app_row, user.version, user.tag, sealed)
        self._after_commit.append(lambda: cache.put(cache.users, row, witness, user))

    def _ensure_first_key(self, owner: bytes) -> None:
        """Create the first data key of an owner that has no row yet.

        Without a key database, raise TamperedError if the owner already has a data key: somebody
        has removed the owner's row.

        With a key database, such a data key is no error.  A process stores the data key before the
        owner's row, and the process may have stopped before it stored the row.  But the data key
        may also be an erased key that an attacker inserted again.  Therefore, create a new data
        key.
        """
        self._require_read_keys()
        separate = self._attempt.key_source is KeySource.KEY_DATABASE
        if self._keys.has_keys(owner) and not separate:
            raise TamperedError(
                f"the row of the user or app with tag {owner.hex()} was removed: its data key is "
                "still stored",
                reason=Reason.MISSING,
            )
        self._keys.adopt(owner, ())
        if self._keys.current(owner) is None:
            self._new_key(owner)

    def _ensure_key(self, owner: bytes, *stored: bytes) -> None:
        """Ensure that *owner* has a current data key that `retire` cannot delete before the commit.

        The current data key encrypts the new records of the owner.  `retire` deletes a data key
        only if no record is encrypted with that key or an older one.  The transaction requires that
        the records *stored* are unchanged.  Therefore, `retire` keeps the current data key if it is
        at least as new as the keys that encrypt *stored*.

        The current data key may be older, because the newest data key belongs to another backend.
        A change then locks the row of the current data key.  With a key database, no change can
        lock that row, so a new data key is created.  A new data key is also created if the owner
        has no current data key.
        """
        keys = self._keys
        if keys.is_as_new_as(owner, *stored):
            return
        self._require_read_keys()
        if keys.created:
            keys.adopt(owner, keys.created)
            if keys.is_as_new_as(owner, *stored):
                return
        for record in stored:
            # Raise an error if the record's key does not exist.  Otherwise, `is_as_new_as` would
            # return False in every attempt, and each attempt would create another key.
            keys.key_of(owner, record)
        current = keys.current(owner)
        if current is None or self._attempt.key_source is KeySource.KEY_DATABASE:
            self._new_key(owner)
        else:
            locked = {"at_id": current.id, "generation": current.generation}
            self.changes += [*claim_data_key(current.id), Change(sql.HOLD_KEY, locked)]

    def _new_key(self, owner: bytes, not_before: int = 0) -> None:
        """Create a data key of *owner* and add the change that stores the data key.

        With a key database, the data key cannot be stored in this transaction.  Then raise
        NeedsDataKey, so that `UnitOfWork.run` stores a data key before the next attempt.
        """
        if self._attempt.key_source is KeySource.KEY_DATABASE:
            raise NeedsDataKey(owner, not_before)
        row = self._keys.new(owner, not_before)
        columns = row._asdict() | self._keys.keyring_guard()
        self.changes += [*claim_keyring(row.id), Change(sql.INSERT_KEY, columns)]

    def _require_read_keys(self) -> None:
        """Raise UnknownKeyError if this attempt uses cached data keys instead of reading them.

        `UnitOfWork.run` then repeats the operation, and reads the data keys.
        """
        if self._attempt.key_source is KeySource.CACHE:
            raise UnknownKeyError("the owner's data keys have to be read again")
