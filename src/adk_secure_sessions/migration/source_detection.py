"""Open the source that a URL names."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import tzinfo
from functools import partial
from itertools import chain
from pathlib import Path

import sqlalchemy as sa

from adk_secure_sessions.backends.registry import DEFAULT, NO_OP, backends_for
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.keys.providers import read_environment, read_private_file
from adk_secure_sessions.maintenance import Database
from adk_secure_sessions.migration.adk_queries import TableKind, kinds_in
from adk_secure_sessions.migration.adk_tables import AdkTables
from adk_secure_sessions.migration.encrypted_source import EncryptedSource
from adk_secure_sessions.migration.package_1x import Package1xTables
from adk_secure_sessions.migration.sources import Source

_AES_KEY_LENGTH = 32
_ENCRYPTED_BY_1X = (
    "the source is encrypted, at least in part, by adk-secure-sessions 1.x: give the key of 1.x "
    "with --from-key (keys), and any plaintext is reported as unreadable; or, if google-adk has "
    "written the source, move the rows that 1.x has encrypted to another database"
)


@hides_locals
async def open_source(
    db_url: str | sa.URL,
    keys: Sequence[str] = (),
    backends: Sequence[str] = (),
    *,
    key_db_url: str | sa.URL | None = None,
    time_zone: tzinfo | None = None,
) -> Source:
    """Recognize the tables of a database, and return the source that reads them.

    One database may contain the tables of this package and other session tables:

    - google-adk's tables and those of this package: the source is google-adk's tables, unless
      *keys* or the backend `no-op` are given.
    - The tables of adk-secure-sessions 1.x and those of this package: the source is the tables of
      1.x, unless both *backends* and *keys*, or the backend `no-op`, are given.

    google-adk and adk-secure-sessions 1.x use the same names for their tables: if 1.x has encrypted
    one of the first or last states or, with *keys*, any state, the tables are those of 1.x.  For a
    `Package1xTables`, states and events in plaintext are unreadable.

    Args:
        db_url: The database URL.
        keys: Key specs of the root keys of the source.  For a database of adk-secure-sessions 1.x,
            `env:NAME` or `file:PATH` names the key or passphrase that the application gave to its
            backend.
        backends: The names of the backends that encrypted the source; by default `aesgcm`.
        key_db_url: The key database of the source, if there is one.
        time_zone: As for `AdkTables`.

    Raises:
        ConfigurationError: The database contains no sessions that can be read; or it is encrypted,
            or encrypted in part, and *keys* are missing; or an argument is given that such a source
            does not use.
        DatabaseError: The database cannot be reached.
    """
    has_keys = bool(keys) or NO_OP in backends
    async with AdkTables(db_url) as tables:
        # The first and the last states may be plaintext.  Without reading all of them, the last
        # error below would tell the caller to omit the keys.
        kinds = await tables.run_without_snapshot(partial(kinds_in, reads_all=has_keys))
    if not kinds:
        raise ConfigurationError(
            "the source contains neither google-adk's tables nor those of this package: check the "
            "URL of the source"
        )
    has_ours = TableKind.ENCRYPTED in kinds
    if TableKind.PACKAGE_1X in kinds and not (has_keys and has_ours and backends):
        if not has_keys:
            raise ConfigurationError(_ENCRYPTED_BY_1X)
        if key_db_url is not None:
            raise ConfigurationError(
                "the source, of adk-secure-sessions 1.x, has no key database: omit --from-key-db "
                "(key_db_url)"
            )
        secrets = chain.from_iterable(map(_package_1x_keys, keys))
        return Package1xTables(db_url, secrets, time_zone=time_zone)
    if has_ours and (has_keys or len(kinds) == 1):
        if not has_keys:
            raise ConfigurationError(
                "the source is encrypted: give the root key of the source with --from-key (keys) "
                "and, unless it is aesgcm, the backend with --from-backend (backends)"
            )
        if time_zone is not None:
            raise ConfigurationError(
                "the source, of this package, has no local times: omit --from-time-zone (time_zone)"
            )
        backend, others = backends_for(backends or [DEFAULT], keys)
        return EncryptedSource(Database(db_url, backend, others, key_db_url=key_db_url))
    if has_keys or backends or key_db_url is not None:
        raise ConfigurationError(
            "the source is not encrypted: omit the keys, backends and key database of the source"
        )
    return AdkTables(db_url, time_zone=time_zone)


@hides_locals
def _package_1x_keys(spec: str) -> list[str | bytes]:
    """Return the key or the passphrase of adk-secure-sessions 1.x that *spec* names.

    If a file contains 32 bytes of text, they may be an AES key or a passphrase: return both.
    """
    scheme, _, rest = spec.partition(":")
    if scheme == "env" and rest:
        return [read_environment(rest)]
    if scheme == "file" and rest:
        content = read_private_file(Path(rest))
        secrets: list[str | bytes] = [content] if len(content) == _AES_KEY_LENGTH else []
        with suppress(UnicodeDecodeError):
            secrets.append(content.decode().removesuffix("\n"))
        if secrets:
            return secrets
        raise ConfigurationError(f"{rest!r} contains neither text nor an AES key of 32 bytes")
    raise ConfigurationError(
        "give the key of a database of adk-secure-sessions 1.x as env:NAME or file:PATH"
    )
