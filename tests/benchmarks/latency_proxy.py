"""A proxy between Unix sockets that delays all data by `DELAY` in each direction.

`python latency_proxy.py LISTEN TARGET` runs in its own process, so that it takes no time from the
process that is measured.
"""

import asyncio
import selectors
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

DELAY = 0.0005  # seconds in each direction: a round trip takes 1 ms longer


@asynccontextmanager
async def latency_proxy(listen: Path, target: Path) -> AsyncIterator[None]:
    """Run the proxy in a subprocess, which listens once the block is entered."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(listen), str(target), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.terminate()
        await process.wait()


class _End(asyncio.Protocol):
    """One end of a proxied connection: sends the data it receives through its peer."""

    def __init__(self, target: str | None = None) -> None:
        self._target = target
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[bytes] = deque()
        self.peer: _End | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._target is not None:
            self._task = asyncio.ensure_future(self._connect(self._target))

    async def _connect(self, target: str) -> None:
        loop = asyncio.get_running_loop()
        _, self.peer = await loop.create_unix_connection(_End, target)
        self.peer.peer = self
        while self._waiting:
            self._pass_on()

    def data_received(self, data: bytes) -> None:
        self._waiting.append(data)
        if self.peer is not None:
            asyncio.get_running_loop().call_later(DELAY, self._pass_on)

    def _pass_on(self) -> None:
        # Timers may fire out of order; the oldest data goes first.
        data = self._waiting.popleft()
        if self.peer is not None and self.peer._transport is not None:
            self.peer._transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.peer is not None and self.peer._transport is not None:
            asyncio.get_running_loop().call_later(2 * DELAY, self.peer._transport.close)


async def _serve(listen: str, target: str) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: _End(target), listen)
    print("ready", flush=True)
    await server.serve_forever()


def _precise_loop() -> asyncio.AbstractEventLoop:
    # epoll waits whole milliseconds, select waits microseconds.
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=_precise_loop) as runner:
        runner.run(_serve(sys.argv[1], sys.argv[2]))
