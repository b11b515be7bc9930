"""Stream blobs of 30 MB and of more MB through a store; print by how many KB the peak grew."""

import asyncio
import hashlib
import resource
import sys
from collections.abc import AsyncIterator

from adk_secure_sessions.integrations.object_store import ArtifactStore
from tests.integrations.object_server import s3_options

MB = 1_000_000


async def source(count: int, written: "hashlib._Hash") -> AsyncIterator[bytes]:
    for number in range(count):
        piece = hashlib.shake_256(str(number).encode()).digest(1000) * (MB // 1000)
        written.update(piece)
        yield piece


async def stream(where: str, address: str, count: int) -> None:
    store = ArtifactStore(
        where, options=s3_options(address) if where.startswith("s3") else None
    ).blobs("p")
    written, found = hashlib.sha256(), hashlib.sha256()
    blob = await store.write(source(count, written))
    async for piece in store.read(blob):
        found.update(piece)
    assert written.digest() == found.digest()
    await store.delete(blob.name)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    where, address, count = sys.argv[1:]
    asyncio.run(stream(where, address, 30))
    before = peak()
    asyncio.run(stream(where, address, int(count)))
    print(peak() - before)
