"""The application that docs/adk-commands.md shows, where things go wrong."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from adk_secure_sessions import WrongKeyError, generate_key
from tests import pages
from tests.sqlite_files import execute

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
MESSAGES = "/sessions/first-visit/messages"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "sessions.db"
    monkeypatch.setenv("DATABASE_URL", f"sqlite+aiosqlite:///{path}")
    monkeypatch.setenv("SESSION_KEY", generate_key())
    return path


def application() -> FastAPI:
    """As a new process would import it."""
    regions = [region for _, region in pages.blocks(pages.DOCS / "adk-commands.md").regions]
    (source,) = [
        region.parsed["source"] for region in regions if region.parsed.get("title") == "app.py"
    ]
    names: dict[str, Any] = {"__name__": "app"}
    exec(source, names)
    app: FastAPI = names["app"]
    return app


async def say(app: FastAPI, *texts: str) -> list[httpx.Response]:
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
    ):
        return [await client.post(MESSAGES, json={"text": text}) for text in texts]


async def test_conversation_goes_on_in_another_process(path: Path) -> None:
    await say(application(), "one", "two")
    (response,) = await say(application(), "three")
    assert response.json() == {"answer": "That was message 3."}


async def test_wrong_key_keeps_the_application_from_starting(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await say(application(), "one")
    monkeypatch.setenv("SESSION_KEY", generate_key())
    with pytest.raises(WrongKeyError):
        await say(application(), "two")


async def test_altered_session_is_told_to_the_log_and_not_to_the_caller(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await say(application(), "one")
    execute(path, "DELETE FROM secure_events WHERE seq = 0")
    (response,) = await say(application(), "two")
    assert response.status_code == 500
    assert response.json() == {"detail": "the session cannot be read"}
    assert "secure_events" in caplog.text


# --- over HTTP -----------------------------------------------------------------------------------


async def test_concurrent_requests_for_one_session_are_answered_with_409(path: Path) -> None:
    with pages.served(application()) as address:
        async with httpx.AsyncClient(base_url=f"http://{address}") as http:
            for _ in range(2):  # the first time, they also create the session
                responses = await asyncio.gather(
                    *(http.post(MESSAGES, json={"text": f"{n}"}, timeout=60) for n in range(12))
                )
                statuses = Counter(response.status_code for response in responses)
                assert statuses.keys() == {200, 409}, statuses
                conflicts = [one.json() for one in responses if one.status_code == 409]
                assert conflicts[0] == {"detail": "another request changed the session"}
