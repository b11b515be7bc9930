"""`EncryptedArtifactService` on a bucket over HTTP, and its rows on every kind of database."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.genai import types

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.integrations.artifact_store import ArtifactStore
from adk_secure_sessions.integrations.artifacts import EncryptedArtifactService
from adk_secure_sessions.integrations.blob_maintenance import check_blobs, purge_blobs
from adk_secure_sessions.maintenance import Database, erase_user, retire, rotate_data, verify
from tests.integrations.object_server import Failure, ObjectServer

BACKEND = AesGcmBackend(bytes(range(32)))
USER: dict[str, Any] = {"app_name": "clinic", "user_id": "needle-user"}
HERE = USER | {"session_id": "needle-session", "filename": "needle-name.png"}
DATA = bytes(range(256)) * 80_000  # 20 MB: three objects


@pytest.fixture
async def sessions(file_url: str) -> AsyncIterator[EncryptedSessionService]:
    async with EncryptedSessionService(file_url, BACKEND) as sessions:
        yield sessions


def artifacts_in(
    sessions: EncryptedSessionService, server: ObjectServer
) -> EncryptedArtifactService:
    store = ArtifactStore(server.url("ada"), options=server.options, timeout=5)
    return EncryptedArtifactService(sessions, store)


def blob(data: bytes) -> types.Part:
    return types.Part(inline_data=types.Blob(mime_type="image/png", data=data))


async def pieces(data: bytes = DATA) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1_000_000):
        yield data[start : start + 1_000_000]


# --- a bucket, and rows on SQLite, PostgreSQL and MariaDB -----------------------------------------


async def test_artifacts_are_saved_loaded_and_deleted(url: str, server: ObjectServer) -> None:
    async with EncryptedSessionService(url, BACKEND) as sessions:
        artifacts = artifacts_in(sessions, server)
        for version, data in enumerate((b"first", b"", b"third")):
            assert await artifacts.save_artifact(**HERE, artifact=blob(data)) == version
        assert await artifacts.save_stream(**HERE, pieces=pieces(), mime_type="image/png") == 3
        stored = server.keys()
        assert len(stored) == 3 + 3
        assert not [key for key in stored if "needle" in key or not key.startswith("ada/")]

    async with EncryptedSessionService(url, BACKEND) as sessions:
        artifacts = artifacts_in(sessions, server)
        assert await artifacts.list_artifact_keys(**USER, session_id="needle-session") == [
            "needle-name.png"
        ]
        for version, data in enumerate((b"first", b"", b"third")):
            assert await artifacts.load_artifact(**HERE, version=version) == blob(data)
        for start, stop in ((0, None), (8_000_000, 17_000_000), (20_479_999, 20_480_000)):
            stream = await artifacts.open_stream(**HERE, start=start, stop=stop)
            assert stream is not None
            assert await stream.read() == DATA[start:stop]
        server.requests.clear()
        stream = await artifacts.open_stream(**HERE, start=10_000_000, stop=10_000_001)
        assert stream is not None
        await stream.read()
        assert [method for method, _ in server.requests] == ["GET"]  # one of the three objects
        before = server.keys()
        await artifacts.delete_artifact(**HERE)
        assert await artifacts.list_versions(**HERE) == []
        names = {key.split("/")[-2] for key in before}
        new = set(server.keys()) - set(before)
        assert len(new) == len(names)
        assert {tuple(key.split("/")[-2:]) for key in new} == {("deleted", name) for name in names}


async def test_concurrent_saves_get_distinct_versions(url: str, server: ObjectServer) -> None:
    async with (
        EncryptedSessionService(url, BACKEND) as one,
        EncryptedSessionService(url, BACKEND) as other,
    ):
        services = [artifacts_in(sessions, server) for sessions in (one, other)]
        saved = await asyncio.gather(
            *(
                services[n % 2].save_artifact(**HERE, artifact=types.Part(text=str(n)))
                for n in range(12)
            )
        )
        assert sorted(saved) == list(range(12))
        for n, version in enumerate(saved):
            loaded = await services[0].load_artifact(**HERE, version=version)
            assert loaded == types.Part(text=str(n))
    assert len(server.keys()) == 12


async def test_maintenance_includes_artifacts(url: str, server: ObjectServer) -> None:
    where = ArtifactStore(server.url("ada"), options=server.options)
    for user_id in ("needle-user", "bob"):
        async with EncryptedSessionService(url, BACKEND) as sessions:
            artifacts = artifacts_in(sessions, server)
            await artifacts.save_artifact(**HERE | {"user_id": user_id}, artifact=blob(b"data"))
    async with Database(url, BACKEND) as db:
        assert (await verify(db)).bad == 0
        await rotate_data(db)
        await retire(db)
        assert (await check_blobs(db, where)).numbers == (2, 2, 0, 0, 0, 0)
        await erase_user(db, "clinic", "needle-user")
        assert (await check_blobs(db, where)).numbers == (1, 1, 0, 0, 1, 0)
        purged = await purge_blobs(db, where)
        assert purged.numbers == (0, 0, 0, 1, 0)  # the blob was written today
        assert (await verify(db)).bad == 0
    assert len(server.keys()) == 2
    async with EncryptedSessionService(url, BACKEND) as sessions:
        artifacts = artifacts_in(sessions, server)
        assert await artifacts.load_artifact(**HERE) is None
        assert await artifacts.load_artifact(**HERE | {"user_id": "bob"}) == blob(b"data")


# --- a store that fails ---------------------------------------------------------------------------


async def test_artifact_is_deleted_while_the_store_fails(
    sessions: EncryptedSessionService,
    server: ObjectServer,
    file_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    artifacts = artifacts_in(sessions, server)
    for data in (b"old", b"new"):
        await artifacts.save_artifact(**HERE, artifact=blob(data))
    server.failures.append(Failure(503, "SlowDown"))
    with caplog.at_level(logging.DEBUG, "adk_secure_sessions"):
        await artifacts.delete_artifact(**HERE)
    assert "left to `purge blobs`" in caplog.text
    assert "needle" not in caplog.text
    assert await artifacts.load_artifact(**HERE) is None
    assert len(server.keys()) == 2, "each request may take a minute, so no other one was sent"
    async with Database(file_url, BACKEND) as db:
        found = await check_blobs(db, ArtifactStore(server.url("ada"), options=server.options))
    assert (found.unused, found.bad) == (2, 0)
