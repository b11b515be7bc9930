"""A proxy between a service and its server that cuts connections at a given moment.

How it works: `proxy_before(url)` listens on a Unix socket and passes all bytes on to the server,
message by message.  After `cut(how, number)`, it cuts the connection once, at the client's message
of that number.  `leave` says whether it came to that: a test increases the number until it did not.
Between `stall` and `go_on`, it passes nothing on, as a server that does not answer.  After
`forget`, it cuts each open connection at the client's next message, as a firewall that has dropped
idle connections.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path

import sqlalchemy as sa


class Cut(Enum):
    """When a connection is cut, relative to a message of the client."""

    BEFORE = "before the server gets it"
    AT_ONCE = "when the server has got it"
    ANSWERED = "when the server has answered it"


class Proxy:
    """Passes everything on until it is told to cut."""

    def __init__(self, address: Path) -> None:
        self._address = address
        self._countdown = -1
        self._how = Cut.BEFORE
        self.cuts = 0  # made so far
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self._until_stall = 0
        self._forgotten: set[asyncio.StreamWriter] = set()

    def stall(self, number: int = 0) -> None:
        """Pass nothing on, in neither direction, after *number* more messages of the client, until
        `go_on`.
        """
        self._until_stall = number
        if not number:
            self._passes.clear()

    def forget(self) -> None:
        self._forgotten = set(self._writers)

    def go_on(self) -> None:
        self._passes.set()

    def cut(self, how: Cut, number: int) -> None:
        """Cut once, at the client's message of this *number* from now on, counted from 0."""
        self._how, self._countdown = how, number

    def leave(self) -> bool:
        """Do not cut any more; return whether the cut was made."""
        made, self._countdown = self._countdown < 0, -1
        self.cuts += made
        return made

    async def serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        await self._passes.wait()
        server, to_server = await asyncio.open_unix_connection(str(self._address))
        writers = {to_client, to_server}
        self._writers |= writers
        deaf = asyncio.Event()  # the server's next answer is not passed on

        async def ask() -> None:
            while (data := await client.read(1 << 20)) and to_client not in self._forgotten:
                await self._passes.wait()
                counted = self._countdown
                if counted >= 0:
                    self._countdown -= 1
                if counted == 0 and self._how is Cut.BEFORE:
                    return
                if counted == 0 and self._how is Cut.ANSWERED:
                    deaf.set()
                to_server.write(data)
                await to_server.drain()
                if self._until_stall > 0:
                    self._until_stall -= 1
                    if self._until_stall == 0:
                        self.stall()
                if counted == 0 and self._how is Cut.AT_ONCE:
                    return

        async def answer() -> None:
            while (data := await server.read(1 << 20)) and not deaf.is_set():
                await self._passes.wait()
                to_client.write(data)
                await to_client.drain()

        both = {asyncio.create_task(ask()), asyncio.create_task(answer())}
        self._tasks |= both
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for writer in writers:
            writer.close()
        for task in both:
            task.cancel()
        await asyncio.gather(
            *both, *(writer.wait_closed() for writer in writers), return_exceptions=True
        )
        self._tasks -= both
        self._writers -= writers

    async def end(self) -> None:
        self.go_on()
        for writer in self._writers:
            writer.close()
        while self._tasks:
            await asyncio.wait(self._tasks)
            await asyncio.sleep(0)


@asynccontextmanager
async def proxy_before(url: sa.URL) -> AsyncIterator[tuple[Proxy, sa.URL]]:
    """Run a proxy before the server of *url*, on a Unix socket; yield it and a URL by it."""
    # Not pytest's directory: a socket's path has to be short.
    with tempfile.TemporaryDirectory(prefix="proxy-") as directory:
        if socket := url.query.get("unix_socket"):
            address, front = Path(str(socket)), Path(directory, "socket")
            by_proxy = url.update_query_dict({"unix_socket": str(front)})
        else:
            name = ".s.PGSQL.5432"
            address, front = Path(str(url.query["host"]), name), Path(directory, name)
            by_proxy = url.update_query_dict({"host": directory})
        proxy = Proxy(address)
        listening = await asyncio.start_unix_server(proxy.serve, str(front))
        try:
            yield proxy, by_proxy
        finally:
            listening.close()
            await proxy.end()
            await listening.wait_closed()
