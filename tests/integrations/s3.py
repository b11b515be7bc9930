"""S3 by moto, over HTTP, with the failures and delays that moto lacks in front of it.

How it works: `running()` gives a `Server` with an empty bucket.  `options` are the arguments with
which a store opens it.  A test appends to `failures` to make the next requests fail, sets `delay`,
or reads `requests`: the methods and paths so far.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import botocore.session
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Response

REGION = "eu-central-1"
ACCESS_KEY, SECRET = "AKIAEXAMPLE", "needle-of-access"
BUCKET = "clinic-artifacts"


class Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        pass


class Failure(NamedTuple):
    """An answer of a server that fails; S3 puts its code into XML."""

    status: int
    code: str
    method: str = ""  # only requests of this method


class Server:
    """The server: it records requests, and fails when a test says so."""

    def __init__(self) -> None:
        self._moto: Any = DomainDispatcherApplication(create_backend_app)
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

    @property
    def options(self) -> dict[str, Any]:
        return {
            "endpoint": self.address,
            "region": REGION,
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET,
            "retry_config": {"max_retries": 0},
        }

    @cached_property
    def admin(self) -> Any:
        return botocore.session.Session().create_client(
            "s3",
            region_name=REGION,
            endpoint_url=self.address,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET,
        )

    def keys(self) -> list[str]:
        found = self.admin.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return [one["Key"] for one in found]

    def clear(self) -> None:
        """Delete all objects, and forget failures and requests."""
        self.failures.clear()
        self.delay = 0.0
        for key in self.keys():
            self.admin.delete_object(Bucket=BUCKET, Key=key)
        self.requests.clear()

    def __call__(self, environ: Any, start_response: Callable[..., Any]) -> Any:
        method = environ["REQUEST_METHOD"]
        self.requests.append((method, environ["PATH_INFO"]))
        time.sleep(self.delay)
        if self.failures and self.failures[0].method in ("", method):
            failure = self.failures.pop(0)
            # A server may repeat what it was sent.  Our errors must not.
            text = f"<Error><Code>{failure.code}</Code><Message>needle {SECRET}</Message></Error>"
            return Response(text, failure.status, mimetype="application/xml")(
                environ, start_response
            )
        return self._moto(environ, start_response)


@contextmanager
def running() -> Iterator[Server]:
    server = Server()
    try:
        buckets = [one["Name"] for one in server.admin.list_buckets()["Buckets"]]
        if BUCKET not in buckets:  # moto's buckets outlive the server, in the same process
            place = {"LocationConstraint": REGION}
            server.admin.create_bucket(Bucket=BUCKET, CreateBucketConfiguration=place)
        server.clear()
        yield server
    finally:
        server.admin.close()
        server.stop()


if __name__ == "__main__":  # a server in a process of its own, until its standard input ends
    with running() as alone:
        print(alone.address, flush=True)
        sys.stdin.read()
