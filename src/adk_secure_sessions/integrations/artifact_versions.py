"""Convert the versions of artifacts to stored items and back, and name the collections of items.

The versions of one artifact are the items of one collection (`storage.Collections`).  An item names
the blob with the content, and holds the key of that blob (docs/format.md, "Artifacts").  When the
content of a version is re-encrypted, a later item describes the same version again, with another
blob.  The last item that describes a version counts.  Items are never replaced, so the links
between items prove that the last item was not removed.

This module must not import google-adk: the maintenance commands for artifacts use this module, and
importing google-adk takes seconds.
"""

import json
from collections.abc import AsyncIterable
from dataclasses import dataclass
from typing import Any

from adk_secure_sessions.crypto.aead import KEY_LENGTH
from adk_secure_sessions.errors import Reason, TamperedError
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.blobs import MAX_SIZE
from adk_secure_sessions.formats.json_text import JsonObject
from adk_secure_sessions.hiding import HoldsSecrets, hides_locals
from adk_secure_sessions.integrations.artifact_store import ArtifactStore
from adk_secure_sessions.integrations.blob_store import BLOB_ID, Blob
from adk_secure_sessions.storage.features.collections import Address, Collection, Collections
from adk_secure_sessions.storage.schema import events

_KIND = "artifact"  # the first part of the names of our collections
USER_PREFIX = "user:"  # the names of artifacts without a session begin with it


@dataclass(frozen=True, slots=True, repr=False)
class Version(HoldsSecrets):
    """One version of an artifact, without its content."""

    number: int  # 0 for the first version
    part: dict[str, Any]  # the `Part` of google-genai as JSON values, without its bytes or text
    blob: Blob | None  # where the content is; None for a part that refers to a file
    metadata: dict[str, Any]
    time: float  # when the version was saved, in seconds since 1970
    uri: str  # contains no name and no id of ADK
    item_number: int  # of the item that describes the version
    version_count: int  # of the artifact, including the version that this item adds
    reencrypted_since: int | None  # `DataRotation.since` of the last re-encryption of the content

    @property
    def is_text(self) -> bool:
        return "text" in self.part and "inline_data" not in self.part

    @property
    def mime_type(self) -> str | None:
        return mime_type_of(self.part)


def mime_type_of(part: JsonObject) -> str | None:
    """Return the MIME type of the content; None for a reference to another artifact."""
    if "text" in part and "inline_data" not in part:
        return "text/plain"
    data = part.get("inline_data") or part.get("file_data") or {}
    if str(data.get("file_uri", "")).startswith("artifact://"):
        return None
    mime_type: str | None = data.get("mime_type")
    return mime_type


def collection_name(session_id: str | None, filename: str) -> str:
    """Return the name of the collection of an artifact; without a session, it is the user's."""
    return json.dumps([_KIND, session_id, filename], ensure_ascii=False)


def parse_name(collection: str) -> tuple[str | None, str] | None:
    """Return the arguments of `collection_name`; None if the collection stores no artifact."""
    kind, *rest = json.loads(collection)
    return (rest[0], rest[1]) if kind == _KIND else None


def versions_of(collection: Collection | None) -> list[Version]:
    """Return the versions that the items in *collection* describe, in ascending order."""
    latest = {version.number: version for version in _parse_items(collection)}
    return [latest[number] for number in sorted(latest)]


def version_count(collection: Collection | None) -> int:
    """Return how many versions the artifact has; *collection* needs at least the last item."""
    versions = _parse_items(collection)
    return versions[-1].version_count if versions else 0


class VersionExists(Exception):
    """Another task or process has just added the version that `add_version` should add."""


async def add_version(
    collections: Collections,
    store: ArtifactStore,
    address: Address,
    values: JsonObject,
    pieces: AsyncIterable[bytes] | None,
    number: int | None = None,
) -> int:
    """Store the content as a blob, then the item that names the blob; return the version's number.

    *values* are the other values of the item.  Raise ValueError if they exceed a limit, before
    anything is stored, and VersionExists if the version would not get the number *number*.  If the
    item is not stored, `purge blobs` deletes the unused blob.
    """
    from adk_secure_sessions.formats.events import encode_item  # it imports google-adk

    encode_item(values)  # raises ValueError before the content is stored
    if pieces is not None:
        blobs = store.blobs((await collections.runner.keyring()).database_id.hex())
        values = values | {"blob": _blob_values(await blobs.write(pieces))}
    count = 0

    def item(collection: Collection) -> bytes:
        nonlocal count
        count = version_count(collection)
        if number not in (None, count):
            raise VersionExists
        return encode_item(values | {"version": count, "versions": count + 1})

    # If this fails, keep the blob: an attempt whose answer was lost may have stored the item.
    await collections.append(address, item)
    return count


@hides_locals
def reencrypted_item(plaintext: bytes, number: int, count: int, blob: Blob, since: int) -> bytes:
    """Return the plaintext of an item that describes a version again.

    *plaintext* is that of the last such item, *count* the number of versions of the artifact, and
    *since* is `DataRotation.since`.
    """
    _, values = json_text.read_event(plaintext)
    values |= {"blob": _blob_values(blob), "version": number, "versions": count}
    values["rotation"] = since
    return plaintext[: json_text.version_end(plaintext)] + json_text.dumps(values)


def _blob_values(blob: Blob) -> JsonObject:
    return {"prefix": blob.prefix, "name": blob.name, "key": blob.key.hex(), "size": blob.size}


def _parse_blob(values: JsonObject) -> Blob:
    """Return the blob in the JSON *values*; raise ValueError or TypeError if they are malformed."""
    blob = Blob(values["prefix"], values["name"], bytes.fromhex(values["key"]), values["size"])
    if (
        BLOB_ID.fullmatch(blob.prefix)
        and BLOB_ID.fullmatch(blob.name)
        and blob.key.hex() == values["key"]
        and len(blob.key) == KEY_LENGTH
        and type(blob.size) is int
        and 0 <= blob.size <= MAX_SIZE
    ):
        return blob
    raise ValueError


def _parse_items(collection: Collection | None) -> list[Version]:
    """Parse all items in *collection*, and check each item against the item before it."""
    if collection is None:
        return []
    first = collection.size - len(collection.items)
    versions: list[Version] = []
    count = None if first else 0  # the first of several last items cannot be checked
    for number, plaintext in enumerate(collection.items, first):
        versions.append(_parse_item(collection.version.session_row_id, number, plaintext, count))
        count = versions[-1].version_count
    return versions


def _parse_item(row: int, item_number: int, plaintext: bytes, count_before: int | None) -> Version:
    """Return the version that the item describes; raise TamperedError if the item is malformed.

    *count_before* is how many versions the items before describe; None if this is unknown.
    """
    _, values = json_text.read_event(plaintext)
    try:
        blob, since = values.get("blob"), values.get("rotation")
        number, count = values["version"], values["versions"]
        version = Version(
            number,
            dict(values["part"]),
            None if blob is None else _parse_blob(blob),
            dict(values["metadata"]),
            float(values["time"]),
            f"encrypted-artifact:///{row:x}/{number}",
            item_number,
            count,
            since,
        )
        # An item adds the next version, or describes an existing one again.
        if since is None:
            is_valid = number + 1 == count <= item_number + 1 and count_before in (None, number)
        else:
            is_valid = type(since) is int and version.blob is not None
            is_valid &= 0 <= number < count <= item_number and count_before in (None, count)
        if is_valid and type(number) is type(count) is int:
            return version
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        pass
    detail = "its plaintext is malformed"
    raise TamperedError(detail, Reason.MALFORMED, events.name, f"{row}, {item_number}")
