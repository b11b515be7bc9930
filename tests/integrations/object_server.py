"""The server of an object store, with the failures and delays that real servers lack before it.

How it works: an `ObjectServer` listens on loopback.  It passes each request to the server behind
it, which a subclass names.  A test appends to `failures` to make the next requests fail, sets
`delay`, or reads `requests`: the methods and paths so far.  `url()` and `options` are the arguments
with which a store opens the bucket.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Response

REGION = "eu-central-1"
ACCESS_KEY, SECRET = "AKIAEXAMPLE", "needle-of-access"
BUCKET = "clinic-artifacts"
CLOSED = "http://127.0.0.1:9"  # no server listens there


def s3_options(address: str) -> dict[str, Any]:
    """Return the options of a store on an S3 server with this address."""
    return {
        "endpoint": address,
        "region": REGION,
        "access_key_id": ACCESS_KEY,
        "secret_access_key": SECRET,
    }


class Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        pass


class Failure(NamedTuple):
    """An answer of a server that fails; S3, Azure and Google put its code into XML."""

    status: int
    code: str
    method: str = ""  # only requests of this method
    path: str = ""  # only requests whose path contains this text

    def is_of(self, method: str, path: str) -> bool:
        return self.method in ("", method) and self.path in path


class ObjectServer(ABC):
    """A server with one bucket: it records requests, and fails when a test says so."""

    scheme = "s3"

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.failures: list[Failure] = []
        self.delay = 0.0  # seconds, before each answer
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def url(self, path: str = "", bucket: str = BUCKET) -> str:
        return f"{self.scheme}://{bucket}{path and '/'}{path}"

    @property
    def options(self) -> dict[str, Any]:
        return {**self.options_at(self.address), "retry_config": {"max_retries": 0}}

    @abstractmethod
    def options_at(self, address: str) -> dict[str, Any]:
        """Return the options of a store whose server has this address."""

    @abstractmethod
    def keys(self) -> list[str]:
        """Return the names of all objects in the bucket."""

    @abstractmethod
    def delete_all(self) -> None:
        """Delete all objects."""

    def clear(self) -> None:
        """Delete all objects, and forget failures and requests."""
        self.failures.clear()
        self.delay = 0.0
        self.delete_all()
        self.requests.clear()

    @abstractmethod
    def answer(self, environ: Any, start_response: Callable[..., Any]) -> Any:
        """Answer a request, as a WSGI application."""

    def __call__(self, environ: Any, start_response: Callable[..., Any]) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        time.sleep(self.delay)
        if self.failures and self.failures[0].is_of(method, path):
            failure = self.failures.pop(0)
            # A server may repeat what it was sent.  Our errors must not.
            text = f"<Error><Code>{failure.code}</Code><Message>needle {SECRET}</Message></Error>"
            return Response(text, failure.status, mimetype="application/xml")(
                environ, start_response
            )
        return self.answer(environ, start_response)
