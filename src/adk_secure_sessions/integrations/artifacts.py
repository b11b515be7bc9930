"""An artifact service for ADK.

A row describes a version of an artifact: see `artifact_versions`.  A blob in a directory or a
bucket contains the content of a version: see docs/format.md, "Blobs".
"""

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Any

from google.adk.artifacts import BaseArtifactService, artifact_util
from google.adk.artifacts.base_artifact_service import ArtifactVersion
from google.adk.errors.input_validation_error import InputValidationError
from google.adk.version import __version__ as adk_version
from google.genai import types

from adk_secure_sessions.audit import AuditedCall, Trail, audited_access
from adk_secure_sessions.errors import ArtifactStoreError, ConfigurationError, DecryptionError
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.event_parser import validate_model
from adk_secure_sessions.formats.events import dump_model
from adk_secure_sessions.formats.json_text import JsonObject
from adk_secure_sessions.formats.records import decode_text, encode_text
from adk_secure_sessions.hiding import HoldsSecrets, hides_locals
from adk_secure_sessions.integrations.artifact_store import AnyStore, as_store
from adk_secure_sessions.integrations.artifact_versions import (
    USER_PREFIX,
    Version,
    add_version,
    collection_name,
    parse_name,
    version_count,
    versions_of,
)
from adk_secure_sessions.integrations.blob_store import Blob
from adk_secure_sessions.service import EncryptedSessionService, check_ids, reject_unknown_methods
from adk_secure_sessions.storage.features.collections import Address

logger: logging.Logger = logging.getLogger(__name__)

_LEVELS = json_text.MAX_LEVELS - 2  # the item and its field take two levels
# When ADK rewinds a session to a time before the artifact existed, it cannot delete the artifact,
# and saves this empty part instead.
REWIND_TYPE = "application/octet-stream"
REWIND_PLACEHOLDER = types.Part.from_bytes(data=b"", mime_type=REWIND_TYPE)
_MAX_REFERENCES = 5  # how many references to other artifacts one load follows, as in ADK


@hides_locals
class ArtifactStream(HoldsSecrets):
    """The content of one version of an artifact, as an asynchronous iterator of bytes.

    Attributes:
        version: The number of the version.
        mime_type: The MIME type of the content.
        size: The number of bytes of the whole content, even if only a range is read.
    """

    def __init__(self, version: Version, pieces: AsyncIterator[bytes], size: int) -> None:
        self.version: int = version.number
        self.mime_type: str | None = version.mime_type
        self.size: int = size
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces

    async def read(self) -> bytes:
        """Return all bytes that were not read yet."""
        return b"".join([piece async for piece in self._pieces])


@hides_locals
class EncryptedArtifactService(HoldsSecrets, BaseArtifactService):
    """Stores artifacts encrypted: names, types and metadata as rows, contents as blobs.

    The rows are encrypted with the user's data key, and contain the keys of the blobs.  Therefore,
    after `erase-user`, the user's artifacts cannot be decrypted any more.

    Example:
        ```python
        sessions = EncryptedSessionService("sqlite+aiosqlite:///sessions.db", backend)
        artifacts = EncryptedArtifactService(sessions, "artifacts")
        runner = Runner(..., session_service=sessions, artifact_service=artifacts)
        ```
    """

    def __init__(self, session_service: EncryptedSessionService, store: AnyStore) -> None:
        """Use the database and the keys of *session_service*.

        Args:
            session_service: The service whose database also stores the rows of artifacts.
            store: The store of the contents: a directory, or `s3://BUCKET/PREFIX`,
                `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, or a store of `obstore`; or one of
                these with options, as an `ArtifactStore`.

        Raises:
            ConfigurationError: An argument cannot be used as given.
        """
        if not isinstance(session_service, EncryptedSessionService):
            raise ConfigurationError(
                "EncryptedArtifactService uses the database of an EncryptedSessionService: give it "
                f"one, not a {type(session_service).__name__}"
            )
        self._collections = session_service.collections
        self._auditing = session_service._auditing
        self._store = as_store(store)
        self._store.prepare(create=True)

    @property
    def stores_plaintext(self) -> bool:
        """True if new artifacts can be read without a key, because of a `NoOpBackend`."""
        return self._collections.runner.backends.stores_plaintext

    # --- ADK's contract --------------------------------------------------------------------------

    @audited_access("artifact.write")
    async def save_artifact(
        self,
        *,
        app_name: str,
        user_id: str,
        filename: str,
        artifact: types.Part | dict[str, Any],
        session_id: str | None = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> int:
        """Store a new version of an artifact, and return its number.

        Raises:
            InputValidationError: *artifact* is no part, or has neither bytes, nor text, nor a
                reference to a file, or would change when it is stored and read back.  Or
                *custom_metadata* contains a value that cannot be converted to JSON.  Or an id or
                the name is no string or too long.  Or the name does not begin with `user:`, and
                *session_id* is None.
            ArtifactStoreError: The content could not be stored, and no version was added.
            SecureSessionError: The row could not be stored; see `EncryptedSessionService`.
        """
        address = _address(app_name, user_id, filename, session_id)
        part = _as_part(artifact)
        if part.inline_data is None and part.text is None:
            if part.file_data is None:
                raise InputValidationError("Not supported artifact type.")
            _check_reference(part, app_name, user_id, session_id)
        values, content = split_part(part)
        pieces = None if content is None else _single_piece(content)
        return await self._save(address, values, pieces, custom_metadata)

    @audited_access("artifact.read")
    async def load_artifact(
        self,
        *,
        app_name: str,
        user_id: str,
        filename: str,
        session_id: str | None = None,
        version: int | None = None,
    ) -> types.Part | None:
        """Return a version of an artifact, by default the latest; None if there is none.

        Raises:
            DecryptionError: A row or the content was tampered with, or the content is missing.
            ConfigurationError: The installed google-adk cannot read the artifact, which another
                release of google-adk saved.
            ArtifactStoreError: The content could not be read.
            InputValidationError: A reference to another artifact is malformed, or its target
                belongs to another session or user, or more than 5 references follow each other.
        """
        for _ in range(_MAX_REFERENCES + 1):
            stored = await self._find(_address(app_name, user_id, filename, session_id), version)
            if stored is None:
                return None
            part = await self._load_part(stored)
            target = _check_reference(part, app_name, user_id, session_id)
            if target is None:
                return None if part == REWIND_PLACEHOLDER else part
            filename, session_id, version = target.filename, target.session_id, target.version
        raise InputValidationError(
            f"The artifact refers to another one through more than {_MAX_REFERENCES} references."
        )

    @audited_access("artifacts.list")
    async def list_artifact_keys(
        self, *, app_name: str, user_id: str, session_id: str | None = None
    ) -> list[str]:
        """Return the sorted names of the artifacts that belong to the user.

        If *session_id* is given, also return the names of that session's artifacts.
        """
        check_ids(app_name, user_id, session_id or "")
        collections = await self._collections.of_user(app_name, user_id)
        artifacts = filter(None, [parse_name(collection.name) for collection in collections])
        return sorted(name for scope, name in artifacts if scope in (None, session_id))

    @audited_access("artifact.delete")
    async def delete_artifact(
        self, *, app_name: str, user_id: str, filename: str, session_id: str | None = None
    ) -> None:
        """Delete all versions of an artifact; if the artifact does not exist, do nothing.

        The rows are deleted, and nobody can decrypt the contents without them.  `purge blobs`
        deletes the contents later.
        """
        address = _address(app_name, user_id, filename, session_id)
        collection = await self._collections.get(address)
        if collection is None:
            return
        # Before the rows are deleted, because they name the blobs.
        blobs = [version.blob for version in versions_of(collection) if version.blob is not None]
        if await self._collections.delete(address):
            await self._mark_deleted(blobs)

    @audited_access("artifacts.list")
    async def list_versions(
        self, *, app_name: str, user_id: str, filename: str, session_id: str | None = None
    ) -> list[int]:
        """Return the numbers of all versions; an empty list for an unknown artifact."""
        address = _address(app_name, user_id, filename, session_id)
        return list(range(version_count(await self._collections.get(address, limit=1))))

    @audited_access("artifacts.list")
    async def list_artifact_versions(
        self, *, app_name: str, user_id: str, filename: str, session_id: str | None = None
    ) -> list[ArtifactVersion]:
        """Return all versions with their metadata, without contents; [] if there is no artifact."""
        collection = await self._collections.get(_address(app_name, user_id, filename, session_id))
        return [_as_artifact_version(version) for version in versions_of(collection)]

    @audited_access("artifacts.list")
    async def get_artifact_version(
        self,
        *,
        app_name: str,
        user_id: str,
        filename: str,
        session_id: str | None = None,
        version: int | None = None,
    ) -> ArtifactVersion | None:
        """Return the metadata of a version, by default of the latest; None if there is none."""
        stored = await self._find(_address(app_name, user_id, filename, session_id), version)
        return None if stored is None else _as_artifact_version(stored)

    # --- streams ---------------------------------------------------------------------------------

    @audited_access("artifact.write")
    async def save_stream(
        self,
        *,
        app_name: str,
        user_id: str,
        filename: str,
        pieces: AsyncIterable[bytes],
        mime_type: str,
        session_id: str | None = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> int:
        """Store *pieces* as the content of a new version, and return the version's number.

        The memory used does not grow with the content.  Raises the errors of `save_artifact`, and
        the errors that *pieces* raises.  If *pieces* raises an error, nothing is stored.
        """
        address = _address(app_name, user_id, filename, session_id)
        part, _ = split_part(_as_part({"inline_data": {"mime_type": mime_type}}))
        return await self._save(address, part, pieces, custom_metadata)

    @audited_access("artifact.read")
    async def open_stream(
        self,
        *,
        app_name: str,
        user_id: str,
        filename: str,
        session_id: str | None = None,
        version: int | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> ArtifactStream | None:
        """Return the content of a version, by default of the latest; None if there is none.

        The stream has the bytes *start* to *stop* - 1, by default all.  Each piece is authenticated
        before it is returned.  If the iteration raises an error, the pieces that were returned are
        only the beginning of the content.  If the artifact is deleted or re-encrypted during the
        iteration, the stream returns the content to its end.

        Raises:
            InputValidationError: The version refers to a file, and has no content.
            ValueError: The range is not within the content.
            DecryptionError: A row was tampered with.  Reading from the stream raises this error if
                the content was tampered with.
            ArtifactStoreError: The store failed.  Only reading from the stream raises this error.
        """
        stored = await self._find(_address(app_name, user_id, filename, session_id), version)
        if stored is None:
            return None
        if stored.blob is None:
            raise InputValidationError("The artifact refers to a file, and has no content.")
        size = stored.blob.size
        if not 0 <= start <= (size if stop is None else stop) <= size:
            raise ValueError(f"bytes {start} to {stop} are not within {size} bytes")
        content = self._store.blobs(stored.blob.prefix).read(stored.blob, start, stop)
        pieces = _recording_rejections(content, self._auditing.trail)
        return ArtifactStream(stored, pieces, size)

    # --- rows and blobs --------------------------------------------------------------------------

    async def _save(
        self,
        address: Address,
        part: JsonObject,
        pieces: AsyncIterable[bytes] | None,
        metadata: dict[str, Any] | None,
    ) -> int:
        checked = _exact_values(metadata or {}, "custom_metadata")
        values = {"part": part, "metadata": checked, "time": time.time()}
        return await add_version(self._collections, self._store, address, values, pieces)

    async def _find(self, address: Address, number: int | None) -> Version | None:
        """Return the version *number*, or the latest if *number* is None; None if there is none."""
        collection = await self._collections.get(address, limit=1)
        if collection is None:
            return None
        (last,) = versions_of(collection)
        number = last.version_count - 1 if number is None else number
        if number == last.number:
            return last
        if not 0 <= number < last.version_count:
            return None
        versions = versions_of(await self._collections.get(address))
        return versions[number] if number < len(versions) else None

    async def _load_part(self, version: Version) -> types.Part:
        is_text = version.is_text
        part = _parse_part({**version.part, "text": None} if is_text else version.part)
        if part is None:
            raise ConfigurationError(
                f"the installed google-adk {adk_version} cannot read this version of the artifact, "
                "which another google-adk saved: install a later one"
            )
        if version.blob is not None:
            pieces = self._store.blobs(version.blob.prefix).read(version.blob)
            content = b"".join([piece async for piece in pieces])
            if is_text:
                part.text = decode_text(content)
            elif part.inline_data is not None:
                part.inline_data.data = content
        return part

    async def _mark_deleted(self, blobs: Sequence[Blob]) -> None:
        """Mark *blobs* as deleted, except those of another database, of which this may be a copy.

        After a failure, mark no more: each request to a store that does not answer takes a minute.
        """
        prefix = (await self._collections.runner.keyring()).database_id.hex()
        try:
            for blob in blobs:
                if blob.prefix == prefix:
                    await self._store.blobs(prefix).mark(blob.name)
        except ArtifactStoreError as error:
            logger.warning("blobs that are not used any more are left to `purge blobs`: %s", error)


reject_unknown_methods(EncryptedArtifactService, BaseArtifactService)


@hides_locals
async def _recording_rejections(
    pieces: AsyncGenerator[bytes, None], trail: Trail | None
) -> AsyncGenerator[bytes, None]:
    """Yield *pieces*; record a rejection, which happens after the call that `accessed` records."""
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece
    except DecryptionError as error:
        await AuditedCall(trail).store_rejected(error)
        raise


def _exact_values(values: JsonObject, name: str) -> JsonObject:
    """Return *values* as JSON values; errors call them *name*."""
    try:
        return json_text.exact_values(values, _LEVELS, name)
    except ValueError as error:  # `adk web` answers only an InputValidationError with status 400
        raise InputValidationError(str(error)) from None


def _address(app_name: str, user_id: str, filename: str, session_id: str | None) -> Address:
    """Check the arguments; return where the artifact is stored."""
    check_ids(app_name, user_id, session_id or "", filename=filename)
    if filename.startswith(USER_PREFIX):
        session_id = None
    elif session_id is None:
        raise InputValidationError("Session ID must be provided for session-scoped artifacts.")
    return app_name, user_id, collection_name(session_id, filename)


def _as_part(artifact: object) -> types.Part:
    """Return *artifact* as a part.  google-adk's `ensure_part` would quote and log its values."""
    if isinstance(artifact, types.Part):
        return artifact
    if isinstance(artifact, dict):
        with suppress(ValueError):
            return validate_model(types.Part, artifact)
    raise InputValidationError(
        "artifact must be a Part, or a dictionary with fields of a Part; mime_type must be a string"
    )


def split_part(part: types.Part) -> tuple[JsonObject, bytes | None]:
    """Return *part* as JSON values, and its bytes or its text, which are stored as a blob."""
    bare, content = part.model_copy(), None
    is_text = part.inline_data is None and part.text is not None
    if part.inline_data is not None:
        content = part.inline_data.data or b""
        bare.inline_data = part.inline_data.model_copy(update={"data": None})
    elif part.text is not None:
        content, bare.text = encode_text(part.text), None
    values = _exact_values(dump_model(bare), "artifact")
    if _parse_part(values) == bare:
        return values | ({"text": ""} if is_text else {}), content
    raise InputValidationError(
        "the artifact is not stored, because it could not be read back as it is: a field holds a "
        "value that JSON cannot represent, or that google-adk rejects"
    )


def _parse_part(values: dict[str, Any]) -> types.Part | None:
    """Return the part in *values*; None if the installed google-adk cannot read it."""
    try:
        return validate_model(types.Part, json_text.dumps(values))
    except ValueError:  # do not chain this error: its text quotes values
        return None


async def _single_piece(content: bytes) -> AsyncIterator[bytes]:
    yield content


def _check_reference(
    part: types.Part, app_name: str, user_id: str, session_id: str | None
) -> artifact_util.ParsedArtifactUri | None:
    """Return the target if *part* refers to another artifact of its scope; otherwise None."""
    if not artifact_util.is_artifact_ref(part):
        return None
    assert part.file_data is not None
    target = artifact_util.parse_artifact_uri(part.file_data.file_uri or "")
    if not target:
        raise InputValidationError("The URI of the artifact reference is invalid.")
    artifact_util.validate_artifact_reference_scope(
        app_name=app_name, user_id=user_id, session_id=session_id, parsed_uri=target
    )
    return target


def _as_artifact_version(version: Version) -> ArtifactVersion:
    return ArtifactVersion(
        version=version.number,
        canonical_uri=version.uri,
        custom_metadata=version.metadata,
        create_time=version.time,
        mime_type=version.mime_type,
    )
