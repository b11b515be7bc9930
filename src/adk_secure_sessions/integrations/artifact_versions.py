"""The versions of an artifact, as they are stored: names of collections, and their items.

The versions of one artifact are the items of one collection (`storage.Collections`).  An item names
the blob with the content, and holds the key of that blob (docs/format.md, "Blobs").  This module
does not import google-adk, because maintenance uses it, too.
"""

import json
from typing import Any, NamedTuple

from adk_secure_sessions.crypto.key_material import hides_frames
from adk_secure_sessions.errors import Reason, TamperedError
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.storage import Collection, events

_KIND = "artifact"  # the first part of the names of our collections


class Blob(NamedTuple):
    """Where the content of a version is stored, and its key.

    Attributes:
        prefix: The id of the database that wrote the blob, in hex.
        name: 32 hex digits.
        key: The key of the blob.
        size: The number of bytes of plaintext.
    """

    prefix: str
    name: str
    key: bytes
    size: int

    def __repr__(self) -> str:  # without the key
        return f"Blob({self.prefix}/{self.name}, {self.size} bytes)"


class Version(NamedTuple):
    """One version of an artifact, without its content.

    Attributes:
        number: 0 for the first version.
        part: The part as JSON values, without its bytes or text.
        blob: Where the content is; None for a part that refers to a file.
        metadata: The caller's metadata.
        time: When it was saved, in seconds since 1970.
        uri: Names the version without an id that a reader could recognise.
    """

    number: int
    part: dict[str, Any]
    blob: Blob | None
    metadata: dict[str, Any]
    time: float
    uri: str

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
    """Return the name of the collection of an artifact; without *session_id*, of the user's."""
    return json.dumps([_KIND, session_id, filename], ensure_ascii=False)


def scope_and_name(collection: str) -> tuple[str | None, str] | None:
    """Return an artifact's session id (None: the user's) and file name; None if it is not one."""
    kind, *rest = json.loads(collection)
    if kind != _KIND:
        return None
    session_id, filename = rest
    return session_id, filename


def is_artifact(collection: str) -> bool:
    """Return whether the collection of this name has the versions of an artifact."""
    return scope_and_name(collection) is not None


def versions_of(collection: Collection) -> list[Version]:
    """Return the versions of an artifact in *collection*.

    Raises:
        TamperedError: An item is not a version.
    """
    first = collection.size - len(collection.items)
    return [_parsed(collection, number) for number in range(first, collection.size)]


@hides_frames
def _parsed(collection: Collection, number: int) -> Version:
    _, values = json_text.read_event(collection.items[number - collection.size])
    row = collection.at.session_row
    try:
        blob = values.get("blob")
        return Version(
            number,
            dict(values["part"]),
            blob and Blob(blob["prefix"], blob["name"], bytes.fromhex(blob["key"]), blob["size"]),
            dict(values["metadata"]),
            float(values["time"]),
            f"encrypted-artifact:///{row:x}/{number}",
        )
    except (KeyError, TypeError, ValueError):
        pass  # raised below: here, its __context__ would hold the item
    raise TamperedError(
        "its plaintext is malformed",
        reason=Reason.MALFORMED,
        table=events.name,
        row=f"{row}, {number}",
    )
