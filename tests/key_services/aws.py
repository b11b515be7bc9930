"""AWS KMS by moto, over HTTP, with the errors and delays that moto lacks in front of it."""

import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import botocore.session
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Request, Response

REGION = "eu-central-1"
ACCESS = {"aws_access_key_id": "AKIAEXAMPLE", "aws_secret_access_key": "needle-of-access"}


class Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        pass


class Kms:
    """The server: it records calls, and fails when a test says so."""

    def __init__(self) -> None:
        self._moto: Any = DomainDispatcherApplication(create_backend_app)
        self.port = 0
        self._thread: threading.Thread | None = None
        self.forget()

    def forget(self) -> None:
        self.operations: list[str] = []  # of providers, in order
        self.contexts: list[dict[str, str]] = []
        self.signers: list[tuple[str, str]] = []  # access key id and region of each signature
        self.failures: list[tuple[str, int]] = []  # code and status, for the next calls
        self.answer: bytes | None = None  # sent instead of every answer
        self.credentials: tuple[int, bytes] | None = None  # status and answer of STS
        self.delay = 0.0  # seconds, before each answer

    def start(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        self._server = make_server(
            "127.0.0.1", self.port, self, threaded=True, request_handler=Quiet
        )
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def admin(self) -> Any:
        session = botocore.session.Session()
        return session.create_client("kms", region_name=REGION, endpoint_url=self.address, **ACCESS)

    def new_key(self) -> str:
        return str(self.admin.create_key()["KeyMetadata"]["Arn"])

    def __call__(self, environ: Any, start_response: Callable[..., Any]) -> Any:
        request = Request(environ, populate_request=False)
        operation = request.headers.get("X-Amz-Target", "").removeprefix("TrentService.")
        if operation in ("Encrypt", "Decrypt"):
            content = request.get_data()  # kept for moto
            self.operations.append(operation)
            # AWS4-HMAC-SHA256 Credential=<key id>/<date>/<region>/kms/aws4_request, ...
            access, _, region, *_ = request.headers["Authorization"].split("/")
            self.signers.append((access.rpartition("=")[2], region))
            self.contexts.append(json.loads(content)["EncryptionContext"])
            time.sleep(self.delay)
            if self.answer is not None:
                return Response(self.answer, 200)(environ, start_response)
            if self.failures:
                code, status = self.failures.pop(0)
                # A server may repeat what it was sent.  Our errors must not.
                text = json.dumps({"__type": code, "message": f"needle {content!r}"})
                return Response(text, status)(environ, start_response)
            environ["wsgi.input"] = io.BytesIO(content)
        elif self.credentials is not None:
            request.get_data()
            status, answer = self.credentials
            return Response(answer, status)(environ, start_response)
        return self._moto(environ, start_response)


@contextmanager
def running() -> Iterator[Kms]:
    kms = Kms()
    kms.start()
    try:
        yield kms
    finally:
        kms.admin.close()
        kms.stop()
