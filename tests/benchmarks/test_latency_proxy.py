"""The latency proxy delays data and does not modify it."""

import asyncio
import tempfile
import time
from pathlib import Path

from tests.benchmarks.latency_proxy import DELAY, latency_proxy


async def test_proxy_forwards_all_bytes_in_order_and_delayed() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    sent = b"".join(number.to_bytes(4, "big") for number in range(100_000))
    with tempfile.TemporaryDirectory() as name:  # the path of a Unix socket has a length limit
        target, listen = Path(name) / "target", Path(name) / "listen"
        async with await asyncio.start_unix_server(echo, target), latency_proxy(listen, target):
            reader, writer = await asyncio.open_unix_connection(listen)
            writer.write(b"first")
            assert await reader.readexactly(5) == b"first"
            start = time.perf_counter()
            writer.write(b"again")
            assert await reader.readexactly(5) == b"again"
            assert time.perf_counter() - start >= 2 * DELAY
            writer.write(sent)
            assert await reader.readexactly(len(sent)) == sent
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
