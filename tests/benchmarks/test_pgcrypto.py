"""One field, encrypted by our cipher in the process and by pgcrypto in PostgreSQL."""

import functools
import os
from collections.abc import AsyncIterator

import asyncpg  # type: ignore[import-untyped]
import pytest
import pytest_asyncio

from adk_secure_sessions import AesGcmBackend
from tests import servers
from tests.benchmarks.databases import OURS
from tests.benchmarks.harness import Operation, interleave
from tests.benchmarks.plan import AES_CBC, FIELD_SIZES, OPENPGP
from tests.benchmarks.results import Figure, Results

pytestmark = [pytest.mark.bench, pytest.mark.asyncio(loop_scope="module")]

CONTEXT = b"context"
SECONDS = 2.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def connection() -> AsyncIterator[asyncpg.Connection]:
    with servers.postgresql_with_contrib() as server, server.admin.connect() as admin:
        admin.exec_driver_sql("CREATE EXTENSION pgcrypto")
        url = server.admin_url
        one = await asyncpg.connect(
            host=url.query["host"], user=url.username, database=url.database
        )
        await one.execute("CREATE TABLE fields (id bigint PRIMARY KEY, value bytea)")
        await one.execute("ALTER TABLE fields ALTER value SET STORAGE EXTERNAL")
        try:
            yield one
        finally:
            await one.close()


@pytest.mark.parametrize("size", FIELD_SIZES)
async def test_field(connection: asyncpg.Connection, results: Results, size: str) -> None:
    version = await connection.fetchval("SHOW server_version")
    results.versions["PostgreSQL with pgcrypto"] = version
    plaintext, key, vector = os.urandom(FIELD_SIZES[size]), os.urandom(32), os.urandom(16)
    backend = AesGcmBackend(key)
    cipher = backend.cipher(backend.new_key())
    insert, select = "INSERT INTO fields VALUES ($1, {})", "SELECT {} FROM fields WHERE id = $1"
    numbers = iter(range(FIELD_SIZES[size] * 1000, 10**12))
    stored: dict[str, int] = {}

    async def write(side: str) -> None:
        stored[side] = number = next(numbers)
        if side == OURS:
            sealed = cipher.encrypt(plaintext, CONTEXT)
            await connection.execute(insert.format("$2"), number, sealed)
        elif side == OPENPGP:
            call = "pgp_sym_encrypt_bytea($2, $3, 'cipher-algo=aes256')"
            await connection.execute(insert.format(call), number, plaintext, key.hex())
        else:
            call = "encrypt_iv($2, $3, $4, 'aes')"
            await connection.execute(insert.format(call), number, plaintext, key, vector)

    async def read(side: str) -> None:
        number = stored[side]
        if side == OURS:
            value = await connection.fetchval(select.format("value"), number)
            value = cipher.decrypt(value, CONTEXT)
        elif side == OPENPGP:
            call = select.format("pgp_sym_decrypt_bytea(value, $2)")
            value = await connection.fetchval(call, number, key.hex())
        else:
            call = select.format("decrypt_iv(value, $2, $3, 'aes')")
            value = await connection.fetchval(call, number, key, vector)
        assert value == plaintext

    for operation, run in (("write", write), ("read", read)):
        sides: dict[str, Operation] = {
            side: functools.partial(run, side) for side in (OURS, OPENPGP, AES_CBC)
        }
        timings = await interleave(sides, SECONDS)
        name = f"pgcrypto/{operation} {size}"
        for side, values in timings.items():
            results.add(f"{name}/{side}", Figure.of(values, "s"))
            if side != OURS:
                results.add(f"{name}/relative to {side}", Figure.ratio(timings[OURS], values))
