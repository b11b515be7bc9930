"""An HTTP server that follows Vault's transit and AppRole API, with real ciphers behind it."""

import base64
import json
import os
import secrets
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Answer = tuple[int, dict[str, Any]]


@dataclass
class TransitKey:
    versions: list[AESGCM]
    min_decryption_version: int = 1

    def encrypt(self, plaintext: bytes, associated_data: bytes | None) -> str:
        nonce = os.urandom(12)
        sealed = nonce + self.versions[-1].encrypt(nonce, plaintext, associated_data)
        return f"vault:v{len(self.versions)}:{base64.b64encode(sealed).decode()}"

    def decrypt(self, ciphertext: str, associated_data: bytes | None) -> bytes:
        prefix, number, text = ciphertext.split(":", 2)
        version = int(number.removeprefix("v")) or 1  # as Vault does
        if prefix != "vault" or version > len(self.versions):
            raise Refused("invalid ciphertext: version is too new")
        if version < self.min_decryption_version:
            raise Refused("ciphertext or signature version is disallowed by policy (too old)")
        sealed = base64.b64decode(text)
        if len(sealed) < 12:
            raise Refused("invalid ciphertext: too short")
        try:
            return self.versions[version - 1].decrypt(sealed[:12], sealed[12:], associated_data)
        except InvalidTag:
            raise Refused("cipher: message authentication failed") from None


class Refused(Exception):
    pass


def new_key() -> AESGCM:
    return AESGCM(AESGCM.generate_key(256))


@dataclass
class Vault:
    """One server; its keys are found by namespace, mount and name."""

    tls: ssl.SSLContext | None = None
    keys: dict[tuple[str, str, str], TransitKey] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)  # until when, monotonic seconds
    role_id: str = field(default_factory=lambda: f"role-{secrets.token_hex(8)}")
    secret_id: str = field(default_factory=lambda: f"secret-{secrets.token_hex(8)}")
    root_token: str = field(default_factory=lambda: f"hvs.{secrets.token_hex(12)}")
    token_lifetime: float = 60.0
    requests: list[str] = field(default_factory=list)  # the paths, in order
    failures: list[int] = field(default_factory=list)  # status codes for the next requests
    delay: float = 0.0  # seconds, before each answer
    sealed: bool = False
    ignores_associated_data: bool = False  # as Vault before 1.13
    answer: bytes | None = None  # sent instead of every answer
    headers: dict[str, str] = field(default_factory=dict)  # sent with every answer
    port: int = 0

    def start(self) -> None:
        self.http = Http(("127.0.0.1", self.port), Handler)
        self.http.vault = self
        self.port = self.http.server_address[1]
        if self.tls:
            self.http.socket = self.tls.wrap_socket(self.http.socket, server_side=True)
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,))
        self.thread.start()

    def stop(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    @property
    def address(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def add_key(self, name: str, mount: str = "transit", namespace: str = "") -> TransitKey:
        key = self.keys[namespace, mount, name] = TransitKey([new_key()])
        return key

    def respond(self, path: str, headers: Any, body: dict[str, str]) -> Answer:
        self.requests.append(path)
        time.sleep(self.delay)
        if headers.get("X-Vault-Request") != "true":  # agents and proxies of Vault may require it
            return 412, {"errors": ["missing 'X-Vault-Request' header"]}
        if self.failures:
            # A server may repeat what it was sent.  Our errors must not.
            return self.failures.pop(0), {"errors": [f"needle {json.dumps(body)}"]}
        if self.sealed:
            return 503, {"errors": ["Vault is sealed"]}
        if path == "auth/approle/login":
            return self._login(body)
        token = headers.get("X-Vault-Token", "")
        if token != self.root_token and self.tokens.get(token, 0.0) < time.monotonic():
            return 403, {"errors": ["permission denied", "invalid token"]}
        mount, operation, name = path.rsplit("/", 2)
        namespace = headers.get("X-Vault-Namespace", "")
        if not any((namespace, mount) == known[:2] for known in self.keys):
            return 404, {"errors": [f"no handler for route {path!r}"]}
        key = self.keys.get((namespace, mount, name))
        if key is None:
            return 400, {"errors": ["encryption key not found"]}
        try:
            return 200, {"data": self._transit(key, operation, body)}
        except Refused as error:
            return 400, {"errors": [str(error)]}

    def _login(self, body: dict[str, str]) -> Answer:
        if (body["role_id"], body["secret_id"]) != (self.role_id, self.secret_id):
            return 400, {"errors": ["invalid role or secret ID"]}
        token = f"hvs.{secrets.token_hex(12)}"
        self.tokens[token] = time.monotonic() + self.token_lifetime
        return 200, {"auth": {"client_token": token, "lease_duration": int(self.token_lifetime)}}

    def _transit(self, key: TransitKey, operation: str, body: dict[str, str]) -> dict[str, str]:
        given = body.get("associated_data")
        ignored = given is None or self.ignores_associated_data or operation == "rewrap"
        associated = None if given is None or ignored else base64.b64decode(given)
        if operation == "encrypt":
            return {"ciphertext": key.encrypt(base64.b64decode(body["plaintext"]), associated)}
        plaintext = key.decrypt(body["ciphertext"], associated)
        if operation == "rewrap":
            return {"ciphertext": key.encrypt(plaintext, None)}
        return {"plaintext": base64.b64encode(plaintext).decode()}


class Http(ThreadingHTTPServer):
    vault: Vault
    block_on_close = True
    daemon_threads = False
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """Ignore clients that have disconnected."""


class Handler(BaseHTTPRequestHandler):
    server: Http

    def do_POST(self) -> None:
        vault = self.server.vault
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.requestline.split()[1]  # self.path has no repeated slashes
        status, answer = vault.respond(path.removeprefix("/v1/"), self.headers, body)
        content = json.dumps(answer).encode() if vault.answer is None else vault.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in vault.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running(vault: Vault) -> Iterator[Vault]:
    vault.start()
    try:
        yield vault
    finally:
        vault.stop()
