"""Stream blobs of 30 MB and of more MB through a store; print by how many KB the peak grew.

If the store is `artifacts:DIRECTORY`, through `EncryptedArtifactService`.
"""

import asyncio
import hashlib
import resource
import secrets
import sys
from collections.abc import AsyncIterator
from typing import Any

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.formats.blobs import (
    BlobDecryptor,
    BlobEncryptor,
    decrypt_stream,
    encrypt_stream,
)
from adk_secure_sessions.integrations.artifacts import EncryptedArtifactService
from adk_secure_sessions.integrations.object_store import ArtifactStore
from tests.integrations.object_server import s3_options

MB = 1_000_000


async def source(count: int, written: "hashlib._Hash") -> AsyncIterator[bytes]:
    for number in range(count):
        piece = hashlib.shake_256(str(number).encode()).digest(1000) * (MB // 1000)
        written.update(piece)
        yield piece


async def stream_artifact(directory: str, count: int) -> None:
    written, found = hashlib.sha256(), hashlib.sha256()
    what: dict[str, Any] = {
        "app_name": "a",
        "user_id": "u",
        "session_id": "s",
        "filename": str(count),
    }
    url = f"sqlite:///{directory}/sessions.db"
    async with EncryptedSessionService(url, AesGcmBackend(bytes(32))) as sessions:
        artifacts = EncryptedArtifactService(sessions, f"{directory}/artifacts")
        await artifacts.save_stream(**what, pieces=source(count, written), mime_type="a/b")
        stream = await artifacts.open_stream(**what)
        assert stream is not None
        async for piece in stream:
            found.update(piece)
        assert (stream.size, found.digest()) == (count * MB, written.digest())
        await artifacts.delete_artifact(**what)


async def stream(where: str, address: str, count: int) -> None:
    if where.startswith("artifacts:"):
        await stream_artifact(where.removeprefix("artifacts:"), count)
        return
    store = ArtifactStore(
        where, options=s3_options(address) if where.startswith("s3") else None
    ).blobs("p")
    written, found = hashlib.sha256(), hashlib.sha256()
    name, encryptor = secrets.token_hex(16), BlobEncryptor()
    size = await store.put_stream(name, encrypt_stream(encryptor, source(count, written)))
    decryptor = BlobDecryptor(encryptor.key, count * MB)
    async for piece in decrypt_stream(decryptor, store.get_stream(name, size)):
        found.update(piece)
    assert written.digest() == found.digest()
    await store.delete(name)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    where, address, count = sys.argv[1:]
    asyncio.run(stream(where, address, 30))
    before = peak()
    asyncio.run(stream(where, address, int(count)))
    print(peak() - before)
