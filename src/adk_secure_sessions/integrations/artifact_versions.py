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
from dataclasses import dataclass
from typing import Any, NamedTuple

from adk_secure_sessions.crypto.aead import KEY_LENGTH
from adk_secure_sessions.crypto.key_material import KeyMaterial
from adk_secure_sessions.errors import Reason, TamperedError
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.blobs import MAX_SIZE
from adk_secure_sessions.formats.json_text import JsonObject
from adk_secure_sessions.integrations.blob_store import BLOB_ID, Blob
from adk_secure_sessions.storage.features.collections import Collection
from adk_secure_sessions.storage.schema import events
from adk_secure_sessions.tracebacks import hides_locals

_KIND = "artifact"  # the first part of the names of our collections


@dataclass(frozen=True, slots=True, repr=False)
class Version(KeyMaterial):
    """One version of an artifact, without its content."""

    number: int  # 0 for the first version
    part: dict[str, Any]  # the `Part` of google-genai as JSON values, without its bytes or text
    blob: Blob | None  # where the content is; None for a part that refers to a file
    metadata: dict[str, Any]
    time: float  # when the version was saved, in seconds since 1970
    uri: str  # contains no name and no id of ADK
    item: int  # the number of the item that describes the version
    rotation: int | None  # `DataRotation.since` of the last re-encryption of the content

    @property
    def is_text(self) -> bool:
        """Whether the content is the part's text."""
        return "text" in self.part and "inline_data" not in self.part

    @property
    def mime_type(self) -> str | None:
        """The MIME type of the content; None for a reference to another artifact."""
        if self.is_text:
            return "text/plain"
        found = self.part.get("inline_data") or self.part.get("file_data") or {}
        if str(found.get("file_uri", "")).startswith("artifact://"):
            return None
        mime_type: str | None = found.get("mime_type")
        return mime_type


def collection_name(session_id: str | None, filename: str) -> str:
    """Return the name of the collection that stores an artifact.

    If *session_id* is None, the artifact belongs to the user, and not to a session.
    """
    return json.dumps([_KIND, session_id, filename], ensure_ascii=False)


def scope_and_name(collection: str) -> tuple[str | None, str] | None:
    """Return the session id and the file name of the artifact that a collection stores.

    The session id is None if the artifact belongs to the user.  Return None if the collection
    stores no artifact.
    """
    kind, *rest = json.loads(collection)
    if kind != _KIND:
        return None
    session_id, filename = rest
    return session_id, filename


def is_artifact(collection: str) -> bool:
    """Return whether the collection with the name *collection* stores an artifact."""
    return scope_and_name(collection) is not None


def versions_of(collection: Collection) -> list[Version]:
    """Return the versions that the items in *collection* describe, in ascending order.

    If *collection* has only the last items of an artifact, the result may lack some versions.
    """
    found: dict[int, Version] = {}
    for described in _described(collection):
        found[described.version.number] = described.version
    return [found[number] for number in sorted(found)]


def version_count(collection: Collection) -> int:
    """Return how many versions the artifact has; *collection* needs at least the last item."""
    *_, last = _described(collection)
    return last.versions


def new_item(values: JsonObject, blob: Blob | None, collection: Collection) -> JsonObject:
    """Return the JSON of an item that describes a new version.

    *values* has the fields `part`, `metadata` and `time`.  *collection* must contain the last item,
    unless the artifact is new.
    """
    number = version_count(collection) if collection.size else 0
    values = values | {"version": number, "versions": number + 1}
    return values if blob is None else values | {"blob": _values(blob)}


@hides_locals
def reencrypted_item(
    plaintext: bytes, number: int, versions: int, blob: Blob, rotation: int
) -> bytes:
    """Return the plaintext of an item that describes the version *number* again.

    *plaintext* is that of the last item that describes the version, and *rotation* is
    `DataRotation.since`.
    """
    _, values = json_text.read_event(plaintext)
    values |= {"blob": _values(blob), "version": number, "versions": versions}
    values["rotation"] = rotation
    return plaintext[: json_text.version_end(plaintext)] + json_text.dumps(values)


def _values(blob: Blob) -> JsonObject:
    """Return *blob* as the JSON values that an item stores."""
    return {
        "prefix": blob.prefix,
        "name": blob.name,
        "key": blob.key.hex(),
        "size": blob.size,
    }


def _blob(values: JsonObject) -> Blob:
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


class _Described(NamedTuple):
    """The content of one item: a version, and the number of versions when the item was added."""

    version: Version
    versions: int


def _described(collection: Collection) -> list[_Described]:
    """Parse all items in *collection*, and check each item against the item before it.

    If *collection* begins with a later item than number 0, the first parsed item is not checked
    against the missing item before it.
    """
    first = collection.size - len(collection.items)
    found: list[_Described] = []
    for number in range(first, collection.size):
        one = _parsed(collection, number)
        before = found[-1].versions if found else None if number else 0
        if before is not None and not _follows(one, before):
            raise _malformed(collection, number)
        found.append(one)
    return found


def _follows(one: _Described, before: int) -> bool:
    """Return whether *one* may follow the previous item, which counts *before* versions.

    *one* must add the next version, or describe an existing version again.
    """
    if one.version.rotation is None:
        return one.version.number == before
    return one.versions == before


@hides_locals
def _parsed(collection: Collection, item: int) -> _Described:
    _, values = json_text.read_event(collection.items[item - collection.size])
    row = collection.at.session_row
    try:
        blob = values.get("blob")
        number, versions = values["version"], values["versions"]
        rotation = values.get("rotation")
        version = Version(
            number,
            dict(values["part"]),
            None if blob is None else _blob(blob),
            dict(values["metadata"]),
            float(values["time"]),
            f"encrypted-artifact:///{row:x}/{number}",
            item,
            rotation,
        )
        is_new = rotation is None and number + 1 == versions <= item + 1
        is_again = type(rotation) is int and version.blob and 0 <= number < versions <= item
        if type(number) is type(versions) is int and (is_new or is_again):
            return _Described(version, versions)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        pass
    raise _malformed(collection, item)


def _malformed(collection: Collection, item: int) -> TamperedError:
    return TamperedError(
        "its plaintext is malformed",
        reason=Reason.MALFORMED,
        table=events.name,
        row=f"{collection.at.session_row}, {item}",
    )
