"""ADK's web server over each service, through its HTTP interface."""

import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.adk.agents import BaseAgent
from google.adk.apps.app import App
from google.adk.sessions import BaseSessionService

from tests.conformance.agents import offline_agent
from tests.conformance.services import POOLED_KINDS
from tests.conformance.support import APP, USER, create, each_kind, event, listed, reload

with warnings.catch_warnings():  # of an old Python, and of ADK's experimental parts
    warnings.simplefilter("ignore")
    from google.adk.cli.fast_api import get_fast_api_app
    from google.adk.cli.service_registry import get_service_registry
    from google.adk.cli.utils.base_agent_loader import BaseAgentLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SESSIONS = f"/apps/{APP}/users/{USER}/sessions"


kind = each_kind(
    *("adk", "encrypted-file"), soak=["encrypted-postgresql", "encrypted-mariadb", *POOLED_KINDS]
)


class OneAgent(BaseAgentLoader):
    def load_agent(self, agent_name: str) -> BaseAgent | App:
        return offline_agent(output_key="user:answer")

    def list_agents(self) -> list[str]:
        return [APP]


@pytest.fixture
async def client(service: BaseSessionService, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    get_service_registry().register_session_service("conformance", lambda uri, **_: service)
    agents = tmp_path / "agents"
    agents.mkdir()
    app = get_fast_api_app(
        agents_dir=str(agents),
        agent_loader=OneAgent(),
        session_service_uri="conformance://",
        artifact_service_uri="memory://",
        memory_service_uri="memory://",
        web=False,
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


def run_request(text: str, **more: Any) -> dict[str, Any]:
    return {
        "appName": APP,
        "userId": USER,
        "sessionId": "session",
        "newMessage": {"role": "user", "parts": [{"text": text}]},
    } | more


async def test_session_is_created_read_and_listed_over_http(
    client: httpx.AsyncClient, service: BaseSessionService
) -> None:
    state = {"k": [1, None], "app:a": 1, "user:u": "ü", "temp:t": 1}
    created = await client.post(SESSIONS, json={"sessionId": "with space", "state": state})
    assert created.status_code == 200
    del state["temp:t"]
    body = created.json()
    assert body["state"] == state
    assert (body["id"], body["appName"], body["userId"]) == ("with space", APP, USER)
    assert (await client.get(f"{SESSIONS}/with%20space")).json() == body
    assert (await client.get(SESSIONS)).json() == [body]
    (session,) = await listed(service)
    assert session.state == state
    assert session.last_update_time == body["lastUpdateTime"]


async def test_session_is_created_with_events_over_http(
    client: httpx.AsyncClient, service: BaseSessionService
) -> None:
    events = [
        event(text).model_dump(mode="json", by_alias=True, exclude_none=True)
        for text in ("one", "two")
    ]
    created = await client.post(SESSIONS, json={"sessionId": "session", "events": events})
    assert created.status_code == 200
    assert len(created.json()["events"]) == 2
    (session,) = await listed(service)
    assert [one.id for one in (await reload(service, session)).events] == [
        one["id"] for one in events
    ]


async def test_taken_id_is_a_conflict_over_http(client: httpx.AsyncClient) -> None:
    assert (await client.post(SESSIONS, json={"sessionId": "s"})).status_code == 200
    assert (await client.post(SESSIONS, json={"sessionId": "s"})).status_code == 409


async def test_unknown_session_is_not_found_over_http(client: httpx.AsyncClient) -> None:
    assert (await client.get(f"{SESSIONS}/unknown")).status_code == 404
    assert (await client.post("/run", json=run_request("hello"))).status_code == 404
    patch = await client.patch(f"{SESSIONS}/unknown", json={"stateDelta": {"k": 1}})
    assert patch.status_code == 404
    assert (await client.delete(f"{SESSIONS}/unknown")).status_code == 200


async def test_patched_state_is_stored_as_an_event(
    client: httpx.AsyncClient, service: BaseSessionService
) -> None:
    session = await create(service, state={"k": 1, "l": 1})
    delta = {"k": 2, "user:u": [1], "app:a": None}
    patched = await client.patch(f"{SESSIONS}/session", json={"stateDelta": delta})
    assert patched.status_code == 200
    assert patched.json()["state"] == {"l": 1} | delta
    again = await reload(service, session)
    assert again.state == {"l": 1} | delta
    assert [one.actions.state_delta for one in again.events] == [delta]


async def test_deleted_session_is_gone_over_http(
    client: httpx.AsyncClient, service: BaseSessionService
) -> None:
    await create(service)
    assert (await client.delete(f"{SESSIONS}/session")).status_code == 200
    assert (await client.get(f"{SESSIONS}/session")).status_code == 404
    assert await listed(service) == []


@pytest.mark.parametrize("route", ["/run", "/run_sse"])
async def test_agent_runs_turn_after_turn_over_http(
    client: httpx.AsyncClient, service: BaseSessionService, route: str
) -> None:
    session = await create(service)
    for text in ("call remember apples", "hello"):
        ran = await client.post(route, json=run_request(text))
        assert ran.status_code == 200
        assert "error" not in ran.text
    stored = await reload(service, session)
    assert [one.author for one in stored.events] == ["user", *["agent"] * 3, "user", "agent"]
    assert stored.state == {
        "last": "apples",
        "user:count": 1,
        "app:any": True,
        "user:answer": "heard 2: hello",
    }
    body = (await client.get(f"{SESSIONS}/session")).json()
    assert [one["id"] for one in body["events"]] == [one.id for one in stored.events]
    assert body["events"][1]["content"]["parts"][0]["functionCall"]["name"] == "remember"


async def test_streamed_run_stores_no_fragments_over_http(
    client: httpx.AsyncClient, service: BaseSessionService
) -> None:
    session = await create(service)
    ran = await client.post("/run_sse", json=run_request("hello", streaming=True))
    assert ran.text.count('"partial":true') == 3
    assert len((await reload(service, session)).events) == 2
