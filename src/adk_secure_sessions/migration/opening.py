"""Open the source that a URL names."""

from collections.abc import Sequence
from datetime import tzinfo

import sqlalchemy as sa

from adk_secure_sessions.backends import EncryptionBackend
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.maintenance import Database
from adk_secure_sessions.migration.adk_tables import AdkTables, Kind, detect
from adk_secure_sessions.migration.encrypted import EncryptedSource
from adk_secure_sessions.migration.sources import Source

_PLAINTEXT = {Kind.ADK_V1, Kind.ADK_V0, Kind.ADK_SQLITE}


async def open_source(
    db_url: str | sa.URL,
    backends: Sequence[EncryptionBackend] = (),
    *,
    key_db_url: str | sa.URL | None = None,
    time_zone: tzinfo | None = None,
) -> Source:
    """Recognize the tables of a database, and return the source that reads them.

    Args:
        db_url: The database URL.
        backends: The backends with the root keys of the source, if the source is encrypted.  If the
            database contains google-adk's tables, too, the encrypted tables are the source if
            *backends* are given.
        key_db_url: The key database of an encrypted source, if there is one.
        time_zone: The time zone of the processes that wrote google-adk's tables; see `AdkTables`.

    Raises:
        ConfigurationError: The database contains no sessions that can be read; or it is encrypted,
            and there are no *backends*; or it is not encrypted, and there are *backends*.
        DatabaseError: The database cannot be reached.
    """
    kinds = await detect(db_url)
    if not kinds:
        raise ConfigurationError(
            "the source contains neither google-adk's tables nor those of this package: check the "
            "URL of the source"
        )
    encrypted = kinds - _PLAINTEXT
    if backends or not kinds & _PLAINTEXT:
        if not encrypted:
            raise ConfigurationError(
                "the source is not encrypted, so it needs no key: omit the key of the source"
            )
        if not backends:
            raise ConfigurationError("the source is encrypted: give the root key of the source")
        return EncryptedSource(
            Database(db_url, backends[0], backends[1:], key_db_url=key_db_url)
        )
    return AdkTables(db_url, time_zone=time_zone)
