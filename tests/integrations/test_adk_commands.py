"""google-adk's own commands with our services, in each of the three ways, and what they write."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import chromium
from tests.attacks.needles import SESSION, USER, needle, state
from tests.integrations.adk_processes import AGENT, KEY_VARIABLE, URI, Place
from tests.servers import REQUIRE_VARIABLE

SESSIONS = f"/apps/{AGENT}/users/{USER}/sessions"
OPTIONS = ("--session_service_uri", URI, "--artifact_service_uri", "memory://")
SERVICES_YAML = """\
services:
  - scheme: encrypted+sqlite
    type: session
    class: adk_secure_sessions.integrations.adk.session_service
"""
SERVICES_PY = """\
from adk_secure_sessions.integrations import adk; adk.register()
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def message(text: str, **more: Any) -> dict[str, Any]:
    return {
        "appName": AGENT,
        "userId": USER,
        "sessionId": SESSION,
        "newMessage": {"role": "user", "parts": [{"text": text}]},
    } | more


def begin(client: httpx.Client) -> None:
    """Create, run, stream, patch, get, list and delete."""
    created = ok(client.post(SESSIONS, json={"sessionId": SESSION, "state": state()}))
    assert created["state"][needle("session key")] == needle("session value")
    (answer,) = ok(client.post("/run", json=message(needle("text"))))
    assert answer["content"]["parts"][0]["text"] == f"Message 1: I have noted '{needle('text')}'."
    streamed = client.post("/run_sse", json=message(needle("text"), streaming=True))
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line[:6] == "data: "]
    assert [event.get("partial") for event in events] == [True] * 6 + [None]
    patched = ok(client.patch(f"{SESSIONS}/{SESSION}", json={"stateDelta": {"patched": [1]}}))
    assert patched["state"]["patched"] == [1]
    ok(client.post(SESSIONS, json={"sessionId": "other"}))
    assert {one["id"] for one in ok(client.get(SESSIONS))} == {SESSION, "other"}
    ok(client.delete(f"{SESSIONS}/other"))
    assert [one["id"] for one in ok(client.get(SESSIONS))] == [SESSION]


def go_on(client: httpx.Client) -> None:
    """Read in a new process what `begin` stored, and continue."""
    session = ok(client.get(f"{SESSIONS}/{SESSION}"))
    assert len(session["events"]) == 5
    assert session["state"]["user:last_answer"].startswith("Message 2: ")
    assert session["state"]["app:" + needle("app key")] == needle("app value")
    (answer,) = ok(client.post("/run", json=message("again")))
    assert answer["content"]["parts"][0]["text"].startswith("Message 3: ")


def test_services_yaml_makes_adk_api_server_store_ciphertext_only(place: Place) -> None:
    (place.agents / "services.yaml").write_text(SERVICES_YAML)
    command = ("adk", "api_server", *OPTIONS, "agents")
    with place.serve(*command) as client:
        begin(client)
    assert place.status == -signal.SIGTERM
    assert set(place.files()) == {"log", "sessions.db"}  # and no -wal, nor .adk
    with place.serve(*command, end=signal.SIGINT) as client:
        go_on(client)
    assert set(place.files()) == {"log", "sessions.db"}
    # The access log of uvicorn has the addresses of requests, and so the ids in them.
    found = place.needles()
    assert set(found) <= {"log"}
    assert found["log"] == {USER, SESSION}


def test_services_py_makes_adk_run_store_ciphertext_only(place: Place) -> None:
    (place.agents / AGENT / "services.py").write_text(SERVICES_PY)
    said = f"{needle('text')}\nonce more\nexit\n"
    done = place.run("adk", "run", *OPTIONS, f"agents/{AGENT}", said=said)
    assert done.returncode == 0, done.stderr
    assert "Message 2: I have noted 'once more'." in done.stdout
    assert {Path(name).parts[0] for name in place.files()} == {"log", "sessions.db", "tmp"}
    assert place.needles() == {}


def test_own_command_runs_adk_web_without_a_needle_in_its_files_and_logs(place: Place) -> None:
    """Over HTTP, then on its page in Chromium, where the session is still there after a reload."""
    command = ("adk-secure-sessions", "adk", "web", *OPTIONS, "agents")
    with place.serve(*command) as client:
        begin(client)
        assert place.needles() == {}  # while it runs, with the write-ahead log
        if has_chromium := chromium.PROGRAM is not None or REQUIRE_VARIABLE in os.environ:
            talk_on_the_page(str(client.base_url))
            assert len(ok(client.get(SESSIONS))) == 2
    assert place.status == -signal.SIGTERM
    assert set(place.files()) == {"log", "sessions.db"}
    assert place.needles() == {}
    assert "/users/.../sessions/... " in place.logged()
    if not has_chromium:
        pytest.skip("chromium is not installed: only the part over HTTP was tested")


def talk_on_the_page(url: str) -> None:
    asked, answered = needle("text"), f"I have noted '{needle('text')}'."
    with chromium.browser() as tab:
        tab.open(f"{url}/dev-ui/?app={AGENT}&userId={USER}")
        tab.send("textarea", asked)
        tab.wait_for(answered)
        address = tab.evaluate("location.href")
        tab.open("about:blank")
        tab.open(address)
        tab.wait_for(answered)


def test_own_command_runs_adk_run_and_ends_with_the_input(place: Place) -> None:
    command = ("adk-secure-sessions", "adk", "run", *OPTIONS, f"agents/{AGENT}")
    done = place.run(*command, said=f"{needle('text')}\n")
    assert done.returncode == 130, done.stderr
    assert "Message 1: I have noted" in done.stdout
    assert "Traceback" not in done.stderr
    assert "sessions.db" in place.files()
    assert place.needles() == {}


@pytest.mark.soak
def test_services_py_makes_adk_api_server_store_ciphertext_only(place: Place) -> None:
    (place.agents / "services.py").write_text(SERVICES_PY)
    command = ("adk", "api_server", *OPTIONS, "agents")
    with place.serve(*command) as client:
        begin(client)
    with place.serve(*command) as client:
        go_on(client)
    assert set(place.files()) == {"log", "sessions.db"}
    assert place.needles() == {"log": {USER, SESSION}}


@pytest.mark.soak
@pytest.mark.parametrize("name", ["postgresql", "mariadb"])
def test_adk_api_server_stores_in_a_database_server(
    place: Place, name: str, request: pytest.FixtureRequest
) -> None:
    (place.agents / "services.py").write_text(SERVICES_PY)
    with request.getfixturevalue(name).database() as url:
        text = url.set(drivername=name).render_as_string(hide_password=False)
        text += f"{'&' if '?' in text else '?'}key=env:{KEY_VARIABLE}"
        command = ("adk", "api_server", "--session_service_uri", f"encrypted+{text}", "agents")
        for drive in (begin, go_on):
            with place.serve(*command, "--artifact_service_uri", "memory://") as client:
                drive(client)
            assert place.status == -signal.SIGTERM
        assert "Traceback" not in place.logged()
        assert set(place.files()) == {"log"}


# --- what must not become plaintext ---------------------------------------------------------------


@pytest.mark.soak
def test_services_py_that_raises_does_not_make_adk_store_plaintext(place: Place) -> None:
    """google-adk logs a warning and goes on; it then resolves the URI itself, and must fail."""
    (place.agents / AGENT / "services.py").write_text("raise RuntimeError\n" + SERVICES_PY)
    done = place.run("adk", "run", *OPTIONS, f"agents/{AGENT}", said="hello\nexit\n")
    assert done.returncode != 0
    assert not [name for name in place.files() if name.endswith(".db")]
