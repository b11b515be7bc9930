"""The feature list in `secure_meta`, with its MAC, and the tables of features.

A feature is an addition to format 2 that earlier releases do not know.  It is added to the list
before the first row that uses it is stored.  Afterwards, those releases reject the database.
"""

import hmac
import re
from collections.abc import Callable
from functools import partial
from weakref import ref

import sqlalchemy as sa

from adk_secure_sessions.concurrency import LoopLocks
from adk_secure_sessions.db.dialects import already_exists, dialect_of, has_table
from adk_secure_sessions.db.failures import translate
from adk_secure_sessions.db.protocol import Conflict
from adk_secure_sessions.errors import ConfigurationError, DatabaseError, WrongKeyError
from adk_secure_sessions.keys.blind_index import IndexMaster
from adk_secure_sessions.keys.keyring import Keyring, SeparationState
from adk_secure_sessions.storage import meta
from adk_secure_sessions.storage.operation_runner import OperationRunner
from adk_secure_sessions.storage.schema import audit_records
from adk_secure_sessions.storage.survey import (
    KNOWN_FEATURES,
    MISPLACED_TEXTS,
    NO_FEATURES,
    SEPARATION_FORM,
    FeatureName,
    Survey,
    TableSet,
    survey_connection,
)

REPLACED_TEXT = (
    "the database was replaced by another one, or another run of `separate` has changed its id: "
    "restart the service, or run the command again"
)


def features_with_mac(
    index_master: IndexMaster, database_id: bytes, features: frozenset[str] = frozenset()
) -> str:
    names = ",".join(sorted(features)) or NO_FEATURES
    return f"{names} {index_master.mac('features', database_id, names).hex()}"


def load_features(survey: Survey, keyring: Keyring) -> None:
    """Authenticate the list and the state of `separate`; set `features`, `separation` and
    `has_audit_table` of *keyring*.
    """
    _check_list(survey, keyring)
    keyring.separation = None
    keyring.features = survey.features
    keyring.has_audit_table = audit_records.name in survey.tables
    if FeatureName.SEPARATING not in survey.features:
        return
    match = re.fullmatch(SEPARATION_FORM, str(survey.meta_texts.get(meta.SEPARATION)))
    if match is None or not hmac.compare_digest(
        keyring.index_master.mac("separation", keyring.database_id, match["text"]).hex(),
        match["mac"],
    ):
        raise WrongKeyError(
            "the row `separation` of secure_meta was tampered with: copy the database again"
        )
    masters = frozenset(map(int, match["masters"].split()))
    keyring.separation = SeparationState(bytes.fromhex(match["old"]), int(match["since"]), masters)


def separation_rows(
    separation: SeparationState, index_master: IndexMaster, new_id: bytes, features: frozenset[str]
) -> dict[str, str]:
    """Return the texts, by name, that `separate` stores in `secure_meta` when it begins."""
    masters = " ".join(map(str, sorted(separation.master_ids)))
    text = f"{separation.old_id.hex()} {separation.since} {masters}"
    return {
        meta.DATABASE_ID: new_id.hex(),
        meta.FEATURES: features_with_mac(index_master, new_id, features | {FeatureName.SEPARATING}),
        meta.SEPARATION: f"{text} {index_master.mac('separation', new_id, text).hex()}",
    }


def add_feature(feature: str, keyring: Keyring, connection: sa.Connection) -> None:
    """Add *feature* to the stored features; raise Conflict if another process has changed them at
    the same time.
    """
    survey = survey_connection(connection)
    if survey.table_set is TableSet.DATA:
        raise ConfigurationError(MISPLACED_TEXTS[TableSet.ALL, TableSet.DATA])
    survey.reject_unfinished(FeatureName.SEPARATING, FeatureName.MOVING)
    _check_list(survey, keyring)
    if feature in survey.features:
        return
    value = features_with_mac(
        keyring.index_master, keyring.database_id, survey.features | {feature}
    )
    if not meta.swap(connection, meta.FEATURES, survey.meta_texts[meta.FEATURES], value):
        raise Conflict  # another process has changed the features since they were read above


def _check_list(survey: Survey, keyring: Keyring) -> None:
    if survey.meta_texts.get(meta.DATABASE_ID) != keyring.database_id.hex():
        raise ConfigurationError(REPLACED_TEXT)
    listed = survey.feature_list
    expected = keyring.index_master.mac("features", keyring.database_id, listed["names"])
    if not hmac.compare_digest(expected.hex(), listed["mac"]):
        raise WrongKeyError(
            "the row `features` of secure_meta was tampered with: restore that table from a backup"
        )


# --- adding features ------------------------------------------------------------------------------


def create_table_of(feature: str, connection: sa.Connection, *, may_create: bool) -> None:
    """Create the table of *feature* in the data database, if it has one that does not exist.

    Call this before `add_feature`.  If a process stops in between, the database has an empty table
    and not the feature, so other releases still accept the database.
    """
    if (table := KNOWN_FEATURES[feature]) is None:
        return
    dialect = dialect_of(connection)
    advice = f"run the statement of docs/sql/{dialect.name}-{feature}.sql"
    with dialect.exclusively(connection):
        if has_table(connection, table):
            return
        if not may_create:
            raise ConfigurationError(
                f"the table {table.name} is missing, and create_tables is False: {advice}"
            )
        try:
            table.metadata.create_all(connection, [table], checkfirst=False)
        except sa.exc.DBAPIError as error:
            if already_exists(error):
                connection.rollback()
                if has_table(connection, table):
                    return  # another process has created the table meanwhile
            failure = translate(error)
            if not isinstance(failure, DatabaseError):
                raise failure from None
            raise ConfigurationError(
                f"the table {table.name} could not be created: {failure}; if the account may not "
                f"create tables, {advice}"
            ) from None


def _has_rows_of(feature: str, connection: sa.Connection) -> bool:
    table = KNOWN_FEATURES[feature]
    if table is None or not has_table(connection, table):
        return False
    return bool(connection.scalar(sa.select(sa.select(table).exists())))


class Feature:
    """The feature *name*, which a process adds to the database before storing rows that need it.

    If its table is missing, `ensure` creates the table, or raises ConfigurationError if the runner
    creates no tables.
    """

    def __init__(self, runner: OperationRunner, name: str) -> None:
        self._runner = runner
        self._name = name
        # Returns the keyring that was current when the feature was last added or found.  The
        # reference is weak, so that `OperationRunner.close` discards the keys.
        self._ensured_keyring: Callable[[], Keyring | None] = lambda: None
        self._locks = LoopLocks()

    async def ensure(self) -> None:
        """Add the feature to the database if it is missing.

        A call accesses the database only if it is the first call, or the first call after this
        process has read the keyring again.
        """
        keyring = await self._runner.keyring()
        if self._ensured_keyring() is keyring:
            return
        async with self._locks.lock("feature"):
            if self._ensured_keyring() is keyring:
                return
            if KNOWN_FEATURES[self._name] is not None and not await self._is_listed(keyring):
                create = partial(
                    create_table_of, self._name, may_create=self._runner.creates_tables
                )
                await self._runner.data_db.run_sync(create)
            # If the process stops before this, the next call adds the feature.
            await self._runner.key_db.run_sync(partial(add_feature, self._name, keyring))
            self._ensured_keyring = ref(keyring)

    async def is_added(self) -> bool:
        """Return whether the database has the feature."""
        keyring = await self._runner.keyring()
        if self._ensured_keyring() is keyring:
            return True
        # Read the table before the feature list.  Another process may be adding the feature: it
        # changes the list before it stores rows in the table.
        has_rows = await self._runner.data_db.run_sync(
            partial(_has_rows_of, self._name), commit=False
        )
        if await self._is_listed(keyring):
            self._ensured_keyring = ref(keyring)
            return True
        if has_rows:
            raise WrongKeyError(
                f"the feature '{self._name}' is not listed in secure_meta, and its table has rows: "
                "an older list was replayed; restore secure_meta from a backup"
            )
        return False

    async def _is_listed(self, keyring: Keyring) -> bool:
        """Return whether the authenticated feature list contains the feature."""
        survey = await self._runner.key_db.run_sync(survey_connection, commit=False)
        _check_list(survey, keyring)
        return self._name in survey.features
