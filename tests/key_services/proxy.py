"""An HTTP proxy that records what it reads, and makes tunnels (CONNECT)."""

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer


class Proxy(ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[bytes] = []  # the start of each: its head, and of its body what came

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def tunnels(self) -> list[bytes]:
        return [one for one in self.requests if one.startswith(b"CONNECT ")]


class Handler(BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        client: socket.socket = self.request
        client.settimeout(5)
        asked = b""
        with suppress(TimeoutError):
            while b"\r\n\r\n" not in asked and (part := client.recv(65536)):
                asked += part
        if not asked:
            return
        self.server.requests.append(asked)
        if not asked.startswith(b"CONNECT "):
            client.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            return
        host, _, port = asked.split(b" ")[1].decode().rpartition(":")
        with socket.create_connection((host, int(port))) as target:
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            with suppress(OSError):
                forward(client, target)


def forward(*ends: socket.socket) -> None:
    while True:
        ready, _, _ = select.select(ends, [], [], 5)
        if not ready:
            return
        for end in ready:
            data = end.recv(65536)
            if not data:
                return
            ends[end is ends[0]].sendall(data)


@contextmanager
def recording() -> Iterator[Proxy]:
    with Proxy() as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
