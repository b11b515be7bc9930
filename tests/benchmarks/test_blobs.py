"""Blobs of artifacts: encryption alone, and uploads and downloads beside plaintext ones."""

import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from google.genai import types

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.integrations.artifact_store import ArtifactStore
from adk_secure_sessions.integrations.artifacts import EncryptedArtifactService
from adk_secure_sessions.integrations.blob_store import BlobStore
from tests.benchmarks.comparison import SECONDS
from tests.benchmarks.harness import Operation, interleave
from tests.benchmarks.plan import BLOB_GOALS, BLOB_OVERHEAD, BLOB_STORES, BLOBS
from tests.benchmarks.results import Figure, Results
from tests.integrations import real_stores
from tests.integrations.object_server import BUCKET, s3_options
from tests.programs import find

pytestmark = pytest.mark.bench
each_size = pytest.mark.parametrize("size", BLOBS)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def s3_address(results: Results) -> Iterator[str]:
    """An S3 server in another process: s3s-fs if it is installed, or else moto."""
    program = real_stores.PROGRAMS["s3"]
    if find(program.name):
        command = [str(find(program.name)), "--version"]
        name = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        results.versions["S3 server"] = name.strip()
        with real_stores.started("s3") as port:
            yield f"http://127.0.0.1:{port}"
        return
    results.versions["S3 server"] = f"moto {version('moto')}"
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.s3"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate()


def _place(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path
) -> tuple[str, dict[str, Any] | None]:
    """Return the URL of a store of *kind*, and its options."""
    if kind == "directory":
        return str(tmp_path), None
    return f"s3://{BUCKET}", s3_options(request.getfixturevalue("s3_address"))


@pytest.fixture(params=BLOB_STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    url, options = _place(request, request.param, tmp_path)
    return ArtifactStore(url, options=options).blobs("p")


async def _one(piece: bytes) -> AsyncIterator[bytes]:
    yield piece


@pytest.mark.asyncio(loop_scope="session")
@each_size
async def test_store(
    request: pytest.FixtureRequest, results: Results, store: BlobStore, size: str
) -> None:
    """The sides differ in nothing but encryption."""
    kind = request.node.callspec.params["store"]
    data, plain = os.urandom(BLOBS[size]), secrets.token_hex(16)
    await store.put_stream(plain, _one(data))
    encrypted = await store.write(_one(data))

    async def upload_encrypted() -> None:
        await store.write(_one(data))

    async def upload_plain() -> None:
        await store.put_stream(secrets.token_hex(16), _one(data))

    async def download_encrypted() -> bytes:
        return b"".join([piece async for piece in store.read(encrypted)])

    async def download_plain() -> bytes:
        return b"".join([piece async for piece in store.get_stream(plain, len(data))])

    assert await download_encrypted() == await download_plain() == data
    for direction, ours, theirs in (
        ("upload", upload_encrypted, upload_plain),
        ("download", download_encrypted, download_plain),
    ):
        timings = await interleave({"encrypted": ours, "plaintext": theirs}, 4)
        name = f"blobs/{kind}/{direction}, {size}"
        is_goal = (kind, size) == ("s3", "1MB")
        goals = {"encrypted": BLOB_GOALS[direction] if is_goal else None, "plaintext": None}
        for side, values in timings.items():
            results.add(f"{name}/{side}", Figure.of(values, "s", goal=goals[side]))
        ratio = Figure.ratio(
            timings["encrypted"], timings["plaintext"], goal=BLOB_OVERHEAD if is_goal else None
        )
        results.add(f"{name}/relative to plaintext", ratio)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("kind", BLOB_STORES)
async def test_repeated_reads(
    request: pytest.FixtureRequest, results: Results, tmp_path: Path, kind: str
) -> None:
    """Save and load an artifact of 1 MB with the service, which caches no contents."""
    url, options = _place(request, kind, tmp_path)
    database = f"sqlite+aiosqlite:///{tmp_path}/sessions.db"
    what: dict[str, Any] = {
        "app_name": "app",
        "user_id": "user",
        "session_id": "s",
        "filename": "image",
    }
    data = types.Blob(mime_type="image/png", data=os.urandom(BLOBS["1MB"]))
    part = types.Part(inline_data=data)
    async with EncryptedSessionService(database, AesGcmBackend(os.urandom(32))) as sessions:

        def opened() -> EncryptedArtifactService:
            return EncryptedArtifactService(sessions, ArtifactStore(url, options=options))

        artifacts = opened()
        await artifacts.save_artifact(**what, artifact=part)
        assert await artifacts.load_artifact(**what) == part
        sides: dict[str, Operation] = {
            "save": lambda: artifacts.save_artifact(**what, artifact=part),
            "first read": lambda: opened().load_artifact(**what),
            "repeated read": lambda: artifacts.load_artifact(**what),
        }
        for name, values in (await interleave(sides, SECONDS)).items():
            results.add(f"blobs/{kind}/artifact of 1MB/{name}", Figure.of(values, "s"))
