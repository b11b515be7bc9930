"""A gRPC server that follows the API of Cloud KMS, over TLS, with real ciphers behind it."""

import atexit
import functools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import google_crc32c
import grpc
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from google.cloud import kms

from tests.key_services.certificates import certificate

RING = "projects/clinic-1/locations/europe-west3/keyRings/sessions/cryptoKeys"
_SERVICE = "google.cloud.kms.v1.KeyManagementService"


class CloudKms:
    def __init__(self) -> None:
        self.keys = {f"{RING}/{name}": AESGCM(AESGCM.generate_key(256)) for name in "abc"}
        self.operations: list[str] = []
        self.failures: list[str] = []  # names of status codes, for the next calls
        self.delay = 0.0  # seconds, before each answer
        self.mismatch = "the crc32c does not match"  # the text about a wrong checksum
        # What happens to requests and answers on the way.
        self.change_request: Callable[[Any], None] = lambda request: None
        self.change: Callable[[Any], None] = lambda response: None
        self.port = 0

    def start(self) -> None:
        self._pool = ThreadPoolExecutor(8)
        self._server = grpc.server(self._pool)
        handlers = {
            "Encrypt": self._handler(self._encrypt, kms.EncryptRequest, kms.EncryptResponse),
            "Decrypt": self._handler(self._decrypt, kms.DecryptRequest, kms.DecryptResponse),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, handlers),)
        )
        private, public = _trusted()
        credentials = grpc.ssl_server_credentials([(private, public)])
        self.port = self._server.add_secure_port(f"127.0.0.1:{self.port}", credentials)
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()
        self._pool.shutdown()

    @property
    def endpoint(self) -> str:
        return f"localhost:{self.port}"

    def _handler(self, answer: Any, request: Any, response: Any) -> Any:
        def handle(asked: Any, context: Any) -> Any:
            self.operations.append(type(asked).__name__)
            time.sleep(self.delay)
            if "authorization" not in dict(context.invocation_metadata()):
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no credentials")
            if self.failures:
                # A server may repeat what it was sent.  Our errors must not.
                context.abort(grpc.StatusCode[self.failures.pop(0)], f"needle {asked.name}")
            key = self.keys.get(asked.name)
            if key is None:
                context.abort(grpc.StatusCode.NOT_FOUND, "no such key")
            self.change_request(asked)
            said = answer(key, asked, context)
            self.change(said)
            return said

        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=request.deserialize,
            response_serializer=response.serialize,
        )

    def _encrypt(self, key: AESGCM, asked: Any, context: Any) -> Any:
        associated = asked.additional_authenticated_data
        nonce = os.urandom(12)
        ciphertext = nonce + key.encrypt(nonce, asked.plaintext, associated)
        right = asked.additional_authenticated_data_crc32c == google_crc32c.value(associated)
        return kms.EncryptResponse(
            name=f"{asked.name}/cryptoKeyVersions/1",
            ciphertext=ciphertext,
            ciphertext_crc32c=google_crc32c.value(ciphertext),
            verified_plaintext_crc32c=asked.plaintext_crc32c
            == google_crc32c.value(asked.plaintext),
            verified_additional_authenticated_data_crc32c=right,
        )

    def _decrypt(self, key: AESGCM, asked: Any, context: Any) -> Any:
        sealed, associated = asked.ciphertext, asked.additional_authenticated_data
        given = asked.ciphertext_crc32c, asked.additional_authenticated_data_crc32c
        if given != (google_crc32c.value(sealed), google_crc32c.value(associated)):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.mismatch)
        try:
            plaintext = key.decrypt(sealed[:12], sealed[12:], associated)
        except (InvalidTag, ValueError):
            plaintext = None
        if plaintext is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "Decryption failed")
        crc = google_crc32c.value(plaintext)
        return kms.DecryptResponse(plaintext=plaintext, plaintext_crc32c=crc)


@functools.cache
def _trusted() -> tuple[bytes, bytes]:
    """Return the certificate that gRPC trusts in this process: it reads the variable once."""
    made = certificate()
    directory = Path(tempfile.mkdtemp(prefix="gcp-"))
    atexit.register(shutil.rmtree, directory)
    os.environ["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"] = str(made.write(directory)[0])
    return made


@functools.cache
def service_account() -> str:
    """Return a key file as Google issues it; using it needs no call."""
    private = rsa.generate_private_key(65537, 1024).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    account = {
        "type": "service_account",
        "project_id": "clinic-1",
        "private_key_id": "1",
        "private_key": private.decode(),
        "client_email": "sessions@clinic-1.example",
        "token_uri": "https://127.0.0.1:1/token",
    }
    return json.dumps(account)


@contextmanager
def running() -> Iterator[CloudKms]:
    server = CloudKms()
    server.start()
    try:
        yield server
    finally:
        server.stop()
