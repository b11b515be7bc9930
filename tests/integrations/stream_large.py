"""Stream blobs of 30 MB and of more MB through a store; print by how many KB the peak grew."""

import asyncio
import hashlib
import resource
import secrets
import sys
from collections.abc import AsyncIterator

from adk_secure_sessions.formats.blobs import (
    BlobDecryptor,
    BlobEncryptor,
    decrypt_stream,
    encrypt_stream,
)
from adk_secure_sessions.integrations.object_store import open_store
from tests.integrations.s3 import ACCESS_KEY, REGION, SECRET

MB = 1_000_000


async def stream(where: str, address: str, count: int) -> None:
    options = {
        "endpoint": address,
        "region": REGION,
        "access_key_id": ACCESS_KEY,
        "secret_access_key": SECRET,
    }
    store = open_store(where, "p", options=options if where.startswith("s3") else None)
    written, found = hashlib.sha256(), hashlib.sha256()

    async def source() -> AsyncIterator[bytes]:
        for number in range(count):
            piece = hashlib.shake_256(str(number).encode()).digest(1000) * (MB // 1000)
            written.update(piece)
            yield piece

    name, encryptor = secrets.token_hex(16), BlobEncryptor()
    size = await store.put_stream(name, encrypt_stream(encryptor, source()))
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
