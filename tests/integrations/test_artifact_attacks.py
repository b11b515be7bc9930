"""Attacks on stored artifacts: their rows in the database, and their blobs in the store."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from google.genai import types

from adk_secure_sessions import (
    AesGcmBackend,
    DecryptionError,
    EncryptedSessionService,
    TamperedError,
)
from adk_secure_sessions.formats.json_text import read_event
from adk_secure_sessions.integrations.artifact_versions import reencrypted_item
from adk_secure_sessions.integrations.artifacts import EncryptedArtifactService
from adk_secure_sessions.integrations.blob_rotation import rotate_data_and_blobs
from adk_secure_sessions.integrations.blob_store import Blob
from adk_secure_sessions.maintenance import Database, verify
from adk_secure_sessions.storage.features.collections import Collections
from tests.attacks.needles import locals_of
from tests.integrations.blob_files import contents, unmarked
from tests.maintenance.support import query, run_sql

BACKEND = AesGcmBackend(bytes(range(32)))
WHO: dict[str, Any] = {"app_name": "clinic", "user_id": "needle-user"}
HERE = WHO | {"session_id": "needle-session", "filename": "needle-name.png"}
NEEDLES: tuple[bytes, ...] = (
    b"needle-user",
    b"needle-session",
    b"needle-name",
    b"needle-content",
    b"needle-meta",
)
NEEDLES += (b"needle-type", b"needle-display")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/s.db"


def part(text: str) -> types.Part:
    data = f"needle-content {text} ".encode() * 9000
    return types.Part(
        inline_data=types.Blob(
            mime_type="application/needle-type", data=data, display_name="needle-display"
        )
    )


@pytest.fixture
async def service(url: str, blobs: Path) -> AsyncIterator[EncryptedArtifactService]:
    async with EncryptedSessionService(url, BACKEND) as sessions:
        service = EncryptedArtifactService(sessions, blobs)
        for text in ("0", "1", "2"):
            await service.save_artifact(
                **HERE, artifact=part(text), custom_metadata={"needle-meta": text}
            )
        yield service


async def load(url: str, blobs: Path, version: int | None = None) -> types.Part | None:
    """Load an artifact in a new service, which has cached nothing."""
    async with EncryptedSessionService(url, BACKEND) as sessions:
        return await EncryptedArtifactService(sessions, blobs).load_artifact(
            **HERE, version=version
        )


async def test_nothing_readable_is_stored(
    service: EncryptedArtifactService, tmp_path: Path
) -> None:
    await service.list_artifact_keys(**WHO)
    for path in tmp_path.rglob("*"):
        stored = str(path).encode() + (path.read_bytes() if path.is_file() else b"")
        assert not [needle for needle in NEEDLES if needle in stored]


async def test_uri_names_nobody(service: EncryptedArtifactService) -> None:
    for version in await service.list_artifact_versions(**HERE):
        assert "needle" not in version.canonical_uri


CHUNK = 65552
# What a blob is replaced by, made of it and of another blob; None: it is removed.
ATTACKS: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "shortened": lambda blob, _: blob[:-1],
    "shortened to a chunk": lambda blob, _: blob[: 5 + CHUNK],
    "lengthened": lambda blob, _: blob + b"\0",
    "modified": lambda blob, _: blob[:70_000] + bytes([blob[70_000] ^ 1]) + blob[70_001:],
    "chunks exchanged": lambda blob, _: (
        blob[:5] + blob[5 + CHUNK : 5 + 2 * CHUNK] + blob[5 : 5 + CHUNK] + blob[5 + 2 * CHUNK :]
    ),
    "replaced by another": lambda _, other: other,
    "removed": lambda *_: None,
    "emptied": lambda *_: b"",
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_changed_blob_is_rejected(
    service: EncryptedArtifactService, url: str, blobs: Path, attack: str
) -> None:
    other, *_, blob = contents(blobs)
    changed = ATTACKS[attack](blob.read_bytes(), other.read_bytes())
    blob.unlink()
    if changed is not None:
        blob.write_bytes(changed)
    with pytest.raises(TamperedError) as rejection:
        await load(url, blobs)
    assert "needle" not in locals_of(rejection.value).replace("needles.py", "")
    assert await load(url, blobs, 0) == part("0")
    stream = await service.open_stream(**HERE)
    assert stream is not None
    with pytest.raises(TamperedError) as rejection:
        await stream.read()
    assert "needle" not in locals_of(rejection.value)


async def test_error_thrown_into_a_stream_shows_no_piece(service: EncryptedArtifactService) -> None:
    stream = await service.open_stream(**HERE)
    assert stream is not None
    pieces: Any = stream.__aiter__()
    assert b"needle" in await anext(pieces)
    with pytest.raises(RuntimeError) as thrown:
        await pieces.athrow(RuntimeError())
    assert "needle" not in locals_of(thrown.value).replace("needles.py", "")


ROWS = {
    "the last version was deleted": "DELETE FROM secure_events WHERE seq = 2",
    "the first version was deleted": "DELETE FROM secure_events WHERE seq = 0",
    "the last version was replaced by an older one": (
        "UPDATE secure_events SET event = (SELECT event FROM secure_events WHERE seq = 0) "
        "WHERE seq = 2"
    ),
    "the artifact's row was deleted": "DELETE FROM secure_sessions",
    "its witness was deleted": (
        "DELETE FROM secure_witnesses WHERE number IN (SELECT id FROM secure_sessions)"
    ),
}


@pytest.mark.parametrize("change", ROWS.values(), ids=ROWS.keys())
async def test_changed_rows_are_rejected(
    service: EncryptedArtifactService, url: str, blobs: Path, change: str
) -> None:
    run_sql(url, change)
    # A read of the latest version does not read the first one.
    for version in (0,) if "seq = 0" in change and "DELETE" in change else (None, 0):
        with pytest.raises(DecryptionError):
            await load(url, blobs, version)
    async with Database(url, BACKEND) as db:
        assert (await verify(db)).bad


async def test_no_traceback_shows_a_key_of_a_blob(
    service: EncryptedArtifactService, url: str, blobs: Path
) -> None:
    async with EncryptedSessionService(url, BACKEND) as sessions:
        found = await sessions.collections.get(
            (
                WHO["app_name"],
                WHO["user_id"],
                json.dumps(["artifact", "needle-session", HERE["filename"]]),
            ),
        )
    assert found is not None
    keys = [read_event(item)[1]["blob"]["key"] for item in found.items]
    failures: list[BaseException] = []
    contents(blobs)[-1].unlink()
    with pytest.raises(TamperedError) as missing:
        await load(url, blobs)
    failures.append(missing.value)
    with pytest.raises(ValueError, match="within") as out_of_range:
        await service.open_stream(**HERE, start=10**9)
    failures.append(out_of_range.value)
    run_sql(url, "DELETE FROM secure_witnesses")
    for call in (service.save_artifact(**HERE, artifact=part("3")), load(url, blobs)):
        with pytest.raises(TamperedError) as rejected:
            await call
        failures.append(rejected.value)
    for failure in failures:
        text = locals_of(failure)
        assert ".<locals>.hidden" in text  # the frames of the library
        for key in keys:
            assert key not in text
            assert repr(bytes.fromhex(key)) not in text


# --- contents that were re-encrypted -------------------------------------------------------------

OLD_ROWS = {
    "the item with the new blob was deleted": "DELETE FROM secure_events WHERE seq = 3",
    "it was replaced by the item with the old blob": (
        "UPDATE secure_events SET event = (SELECT event FROM secure_events WHERE seq = 2) "
        "WHERE seq = 3"
    ),
    "the artifact's row was rolled back": "the old row",
    "the item was deleted, and the row got its number": (
        "DELETE FROM secure_events WHERE seq = 3; UPDATE secure_sessions SET revision = 3"
    ),
}


@pytest.mark.parametrize("attack", OLD_ROWS.values(), ids=OLD_ROWS.keys())
async def test_old_row_of_a_reencrypted_content_is_rejected(
    service: EncryptedArtifactService, url: str, blobs: Path, attack: str
) -> None:
    """The attacker has kept the old blob, and the data key is the same."""
    columns = "revision, updated_at, state"
    ((revision, updated_at, state),) = query(url, f"SELECT {columns} FROM secure_sessions")
    name = json.dumps(["artifact", HERE["session_id"], HERE["filename"]])
    async with Database(url, BACKEND) as db:
        collections = Collections(db.runner)
        found = await collections.get((*db_ids(), name))
        assert found is not None
        blob = Blob((await collections.runner.keyring()).database_id.hex(), "0" * 32, bytes(32), 16)
        item = reencrypted_item(found.items[2], 2, 3, blob, 1)
        await collections.append_at(found.version, (*db_ids(), name), item)
    if attack == "the old row":
        attack = (
            f"UPDATE secure_sessions SET revision = {revision}, updated_at = {updated_at}, "
            f"state = x'{state.hex()}'"
        )
    for statement in attack.split("; "):
        run_sql(url, statement)
    for version in (None, 2):
        with pytest.raises(DecryptionError):
            await load(url, blobs, version)


def db_ids() -> tuple[str, str]:
    return WHO["app_name"], WHO["user_id"]


async def test_old_blob_in_the_place_of_the_reencrypted_one_is_rejected(
    service: EncryptedArtifactService, url: str, blobs: Path
) -> None:
    old = contents(blobs)[-1].read_bytes()
    async with Database(url, BACKEND) as db:
        assert (await rotate_data_and_blobs(db, blobs)).blobs == 3
    assert await load(url, blobs) == part("2")
    unmarked(blobs)[-1].write_bytes(old)
    with pytest.raises(TamperedError):
        await load(url, blobs)


async def test_artifacts_that_claim_2_to_the_63_items_do_not_stop_a_rotation(
    service: EncryptedArtifactService, url: str, blobs: Path
) -> None:
    for name in ("second", "third", "fourth"):
        await service.save_artifact(**HERE | {"filename": name}, artifact=part("0"))
    tampered = "(SELECT id FROM secure_sessions WHERE base_revision = -2 ORDER BY id LIMIT 2)"
    run_sql(url, f"UPDATE secure_sessions SET revision = {2**63 - 1} WHERE id IN {tampered}")
    async with Database(url, BACKEND) as db:
        done = await rotate_data_and_blobs(db, blobs)
    assert {problem.table for problem in done.problems} == {"secure_sessions"}
    assert done.blobs >= 2
