"""The backend that docs/configuration.md shows protects a real database."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.events import Event, EventActions

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    EncryptionBackend,
    KeyProvider,
    StaticKey,
    TamperedError,
    UnknownKeyError,
)
from tests.sqlite_files import execute

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
RUN = "asyncio.run(main())\n"
WHO: dict[str, Any] = {"app_name": "clinic", "user_id": "needle-user", "session_id": "needle-id"}
ROOT = bytes(range(32))


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """What the example of the section defines; tests/test_examples.py runs it as it stands."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "class ChaChaBackend" in block)
    assert code.count(RUN) == 1
    names: dict[str, Any] = {}
    exec(code.replace(RUN, ""), names)
    return names


@pytest.fixture
def make(example: dict[str, Any]) -> Callable[[KeyProvider], EncryptionBackend]:
    backend: Callable[[KeyProvider], EncryptionBackend] = example["ChaChaBackend"]
    return backend


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


def service(
    path: Path, backend: EncryptionBackend, *others: EncryptionBackend
) -> EncryptedSessionService:
    return EncryptedSessionService(f"sqlite+aiosqlite:///{path}", backend, others)


async def write(path: Path, backend: EncryptionBackend) -> None:
    async with service(path, backend) as writing:
        session = await writing.create_session(**WHO, state={"needle": 1, "user:needle": [2]})
        for number in range(3):
            await writing.append_event(
                session,
                Event(
                    author="needle-author",
                    id=f"e-{number}",
                    actions=EventActions(state_delta={"needle": number, "app:needle": "x"}),
                ),
            )


def test_example_has_the_shape_of_the_protocol(
    make: Callable[[KeyProvider], EncryptionBackend],
) -> None:
    backend = make(StaticKey(ROOT))
    assert isinstance(backend, EncryptionBackend)
    assert 0x80 <= backend.backend_id <= 0xFF


async def test_new_service_reads_what_the_example_wrote(
    make: Callable[[KeyProvider], EncryptionBackend], path: Path
) -> None:
    await write(path, make(StaticKey(ROOT)))
    async with service(path, make(StaticKey(ROOT))) as again:
        session = await again.get_session(**WHO)
    assert session is not None
    assert session.state == {"needle": 2, "user:needle": [2], "app:needle": "x"}
    assert [event.id for event in session.events] == ["e-0", "e-1", "e-2"]


async def test_nothing_that_the_example_wrote_is_plaintext(
    make: Callable[[KeyProvider], EncryptionBackend], path: Path
) -> None:
    await write(path, make(StaticKey(ROOT)))
    files = [file.read_bytes() for file in path.parent.iterdir()]
    assert files
    assert not any(b"needle" in content for content in files)
    backend_ids = execute(path, "SELECT substr(event, 5, 1) FROM secure_events")
    assert backend_ids == [(b"\x80",)] * 3


TAMPERING = {
    "altered event": "UPDATE secure_events SET event ="
    " CAST(substr(event, 1, length(event) - 1) ||"
    " CASE hex(substr(event, -1)) WHEN '00' THEN x'01' ELSE x'00' END AS BLOB) WHERE seq = 1",
    "swapped events": "UPDATE secure_events SET event ="
    " (SELECT event FROM secure_events WHERE seq = 2) WHERE seq = 0",
}


@pytest.mark.parametrize("sql", TAMPERING.values(), ids=TAMPERING)
async def test_tampering_with_what_the_example_wrote_is_rejected(
    make: Callable[[KeyProvider], EncryptionBackend], path: Path, sql: str
) -> None:
    await write(path, make(StaticKey(ROOT)))
    execute(path, sql)
    async with service(path, make(StaticKey(ROOT))) as again:
        with pytest.raises(TamperedError) as info:
            await again.get_session(**WHO)
    assert "needle" not in str(info.value)


async def test_another_backend_reads_what_the_example_wrote_if_it_is_listed(
    make: Callable[[KeyProvider], EncryptionBackend], path: Path
) -> None:
    await write(path, make(StaticKey(ROOT)))
    async with service(path, AesGcmBackend(ROOT)) as alone:
        with pytest.raises(UnknownKeyError, match=r"backend 128.*additional_backends"):
            await alone.get_session(**WHO)
    async with service(path, AesGcmBackend(ROOT), make(StaticKey(ROOT))) as both:
        session = await both.get_session(**WHO)
        assert session is not None
        await both.append_event(session, Event(author="agent", id="e-3"))
        session = await both.get_session(**WHO)
    assert session is not None
    assert [event.id for event in session.events] == ["e-0", "e-1", "e-2", "e-3"]
