"""Changes of apps and users: their states, their data keys and their version witnesses."""

from collections.abc import Callable
from functools import partial

from adk_secure_sessions.db.protocol import Change
from adk_secure_sessions.errors import Reason, TamperedError, UnknownKeyError
from adk_secure_sessions.formats.records import new_link
from adk_secure_sessions.formats.states import USER_PREFIX, JsonObject, dumps, loads
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage.attempts import Attempt, KeySource, NeedsDataKey
from adk_secure_sessions.storage.clusters import claim_data_key, claim_keyring
from adk_secure_sessions.storage.features import index_rows
from adk_secure_sessions.storage.queries import Found
from adk_secure_sessions.storage.rows import AppRow, Owner, UserRow, WitnessRow, parameters
from adk_secure_sessions.storage.schema import new_row_key, users
from adk_secure_sessions.storage.sealed_rows import seal_owner, seal_witness


def witness_change(old: int, new: WitnessRow) -> Change:
    values = {"at_tag": new.tag, "at_number": old, "number": new.number, "seal": new.seal}
    return Change(sql.UPDATE_WITNESS, values)


def check_app_row(user: Owner, app_row: int) -> None:
    """Raise TamperedError if *app_row* is not the row id of the user's app."""
    if user.app_row != app_row:
        raise TamperedError(
            "it belongs to another app's row",
            reason=Reason.WRONG_OWNER,
            table=users.name,
            row=user.id,
        )


class OwnerChanges:
    """The *changes* of apps and users that one attempt makes, in the order to apply them."""

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
        """Merge *delta* into the state of the app, or insert the app if *app* is None; return the
        app.

        If *needs_key* is True, also ensure that the app's row names a data key with which this
        process may encrypt new records.
        """
        if app is None:
            app = self._insert(self._attempt.who.app_tag, 0, "", delta)
        elif delta or needs_key:
            assert found.app is not None
            stored = found.app.state
            self._ensure_key(app.tag, stored)
            if delta or not self._names_current_key(app):
                app = self._update(app, stored, delta)
        return app

    def user(self, found: Found, user: Owner | None, app_row: int, delta: JsonObject) -> Owner:
        """Merge *delta* into the state of the user, or insert the user if *user* is None; return
        the user.

        Also ensure that the user's row names a data key with which this process may encrypt new
        records.  *app_row* is the row id of the user's app.
        """
        if user is None:
            who = self._attempt.who
            user = self._insert(who.user_tag, app_row, who.user_id, delta)
            found_entries = index_rows.entries(self._attempt, USER_PREFIX, delta)
            self.changes += index_rows.insertion(index_rows.row_of_user(user.id), found_entries)
            return user
        check_app_row(user, app_row)
        assert found.user is not None
        stored = found.user.state
        self._ensure_key(user.tag, stored, *(row.state for row in found.sessions))
        if delta or not self._names_current_key(user):
            user = self._update(user, stored, delta)
            changed = index_rows.entries(self._attempt, USER_PREFIX, delta)
            self.changes += index_rows.update(index_rows.row_of_user(user.id), changed)
        return user

    def set_state(self, found: Found, owner: Owner, state: bytes) -> Owner:
        """Replace the state of *owner*, the user or app of *found*; return the changed owner."""
        row = found.user if owner.is_user else found.app
        assert row is not None
        self._ensure_key(owner.tag, row.state)
        changed = self._update(owner._replace(state=state), row.state)
        if owner.is_user:
            self._index_user(owner, state)
        return changed

    def _index_user(self, user: Owner, state: bytes) -> None:
        if not self._keys.keyring.indexed_keys:
            return
        old = index_rows.entries(self._attempt, USER_PREFIX, loads(user.state))
        new = index_rows.entries(self._attempt, USER_PREFIX, loads(state))
        row_id = index_rows.row_of_user(user.id)
        self.changes += index_rows.update(row_id, new)
        self.changes += index_rows.removal(row_id, old.keys() - new.keys())

    def renew_key(self, owner: Owner, stored: bytes, since: int) -> bool:
        """Ensure that the owner's row names only one data key, created at *since* or later
        (microseconds UTC); return whether the row changes.  *stored* is the record in the row.
        """
        if self._keys.created:
            self._keys.adopt(owner.tag, self._keys.created)
        current = self._keys.current(owner.tag)
        is_newest = self._keys.current_is_newest(owner.tag)
        if current is None or current.created_at < since or not is_newest:
            self._new_key(owner.tag, since)
        elif owner.key_ids == (current.id,):
            return False
        self._update(owner._replace(key_ids=()), stored)
        return True

    def _names_current_key(self, owner: Owner) -> bool:
        current = self._keys.current(owner.tag)
        return current is not None and current.id in owner.key_ids

    def _insert(self, tag: bytes, app_row: int, user_id: str, state: JsonObject) -> Owner:
        self._ensure_first_key(tag)
        key_ids = self._keys.names(tag, ())
        owner = Owner(new_row_key(), tag, app_row, user_id, 0, dumps(state), new_link(), key_ids)
        row, witness = self._sealed(owner)
        insert = sql.INSERT_USER if owner.is_user else sql.INSERT_APP
        self.changes.append(Change(insert, parameters(row)))
        self.changes.append(Change(sql.INSERT_WITNESS, parameters(witness)))
        return owner

    def _update(self, owner: Owner, stored: bytes, delta: JsonObject | None = None) -> Owner:
        """Add the changes that store the next version of *owner*, whose row has the record
        *stored*.
        """
        number = owner.version
        state = dumps(loads(owner.state) | delta) if delta else owner.state
        key_ids = self._keys.names(owner.tag, owner.key_ids)
        owner = owner._replace(version=number + 1, state=state, link=new_link(), key_ids=key_ids)
        row, witness = self._sealed(owner)
        at = {"at_id": owner.id, "at_version": number, "at_state": stored}
        update = sql.UPDATE_USER if owner.is_user else sql.UPDATE_APP
        self.changes.append(Change(update, at | {"version": row.version, "state": row.state}))
        self.changes.append(witness_change(number, witness))
        return owner

    def _sealed(self, owner: Owner) -> tuple[AppRow | UserRow, WitnessRow]:
        """Return the row and the version witness of *owner*; they are cached after the commit."""
        row = seal_owner(self._attempt, owner)
        witness = seal_witness(self._attempt, owner.tag, owner.tag, owner.version, owner.link)
        self._after_commit.append(partial(self._attempt.cache.put_owner, row, witness, owner))
        return row, witness

    def _ensure_first_key(self, owner: bytes) -> None:
        """Create the first data key of an owner that has no row yet.

        If the owner already has a data key, somebody has removed the owner's row.  With a key
        database, this is no error: a process stores the data key before the owner's row, and may
        have stopped in between.  But the data key may also be an erased key that an attacker
        inserted again, so create a new one.
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

        `retire` deletes a data key only if no record is encrypted with that key or an older one.
        The transaction requires that the records *stored* are unchanged.  Therefore, `retire` keeps
        the current data key if it is at least as new as the keys that encrypt *stored*.

        The current data key may be older, because the newest data key belongs to another backend.
        A change then locks the row of the current data key.  With a key database, no change can
        lock that row, so a new data key is created.
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

        With a key database, the data key cannot be stored in this transaction: NeedsDataKey makes
        `UnitOfWork.run` store one before the next attempt.
        """
        if self._attempt.key_source is KeySource.KEY_DATABASE:
            raise NeedsDataKey(owner, not_before)
        row = self._keys.new(owner, not_before)
        columns = row._asdict() | self._keys.keyring_guard()
        self.changes += [*claim_keyring(row.id), Change(sql.INSERT_KEY, columns)]

    def _require_read_keys(self) -> None:
        """If this attempt uses cached data keys, make `UnitOfWork.run` read them and repeat it."""
        if self._attempt.key_source is KeySource.CACHE:
            raise UnknownKeyError("the owner's data keys have to be read again")
