"""google-adk's own commands with our services, in each of the three ways, and what they write."""

import base64
import json
import signal
from pathlib import Path
from typing import Any

import google.adk.cli as adk_cli
import httpx
import pytest
from websockets.sync.client import connect
from websockets.typing import Origin

from tests import chromium
from tests.attacks.needles import SESSION, USER, found_in, needle, state
from tests.integrations.adk_processes import AGENT, KEY_VARIABLE, URI, Place

SESSIONS = f"/apps/{AGENT}/users/{USER}/sessions"
ARTIFACTS = f"{SESSIONS}/{SESSION}/artifacts"
# The routes of google-adk 1.28's server do not accept a name with a slash.
_ACCEPTS_SLASHES = any(
    "{artifact_name:path}" in path.read_text(encoding="utf-8")
    for path in Path(next(iter(adk_cli.__path__))).glob("*_server.py")
)
FILE = f"{'dir/' if _ACCEPTS_SLASHES else ''}{needle('file name')}.txt"
STORED = {"artifacts", "log", "sessions.db"}  # and no -wal, nor .adk
# One URI for all three services: for our command, and for those of google-adk.
OURS = ("--service_uri", URI)
OPTIONS = tuple(
    text for kind in ("session", "artifact", "memory") for text in (f"--{kind}_service_uri", URI)
)
SAVE_FILES = (
    "--extra_plugins",
    "google.adk.plugins.save_files_as_artifacts_plugin.SaveFilesAsArtifactsPlugin",
)
SERVICES_YAML = "services:\n" + "".join(
    f"""\
  - scheme: encrypted+sqlite
    type: {kind}
    class: adk_secure_sessions.integrations.adk.{kind}_service
"""
    for kind in ("session", "artifact", "memory")
)
SERVICES_PY = """\
from adk_secure_sessions.integrations import adk; adk.register()
"""
# The access log of uvicorn has the addresses of requests, and so the ids and names in them.
IN_ACCESS_LOG = {"log": {USER, SESSION, needle("file name")}}


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
    ok(client.patch(f"/apps/{AGENT}/users/{USER}/memory", json={"sessionId": SESSION}))
    save_files(client)


def save_files(client: httpx.Client) -> None:
    """Upload two versions of an artifact; list, load and delete artifacts."""
    for version in range(2):
        saved = ok(client.post(ARTIFACTS, json=upload(FILE, version)))
        assert saved["version"] == version
        assert not found_in(saved["canonicalUri"])
    ok(client.post(ARTIFACTS, json=upload("other", 0)))
    assert ok(client.get(ARTIFACTS)) == [FILE, "other"]
    ok(client.delete(f"{ARTIFACTS}/other"))
    load_files(client)


def load_files(client: httpx.Client) -> None:
    assert FILE in ok(client.get(ARTIFACTS))
    assert ok(client.get(f"{ARTIFACTS}/{FILE}/versions")) == [0, 1]
    for version in range(2):
        loaded = ok(client.get(f"{ARTIFACTS}/{FILE}/versions/{version}"))
        assert loaded == upload(FILE, version)["artifact"]
    described = ok(client.get(f"{ARTIFACTS}/{FILE}/versions/1/metadata"))
    assert described["customMetadata"] == {"m": needle("file metadata")}
    assert client.get(f"{ARTIFACTS}/other").status_code == 404


def upload(name: str, version: int) -> dict[str, Any]:
    content = f"{version} {needle('file content')}".encode()
    data = base64.urlsafe_b64encode(content).decode()
    part = {"inlineData": {"mimeType": f"text/{needle('file type')}", "data": data}}
    return {"filename": name, "artifact": part, "customMetadata": {"m": needle("file metadata")}}


def go_on(client: httpx.Client) -> None:
    """Read in a new process what `begin` stored, and continue."""
    session = ok(client.get(f"{SESSIONS}/{SESSION}"))
    assert len(session["events"]) == 5
    assert session["state"]["user:last_answer"].startswith("Message 2: ")
    assert session["state"]["app:" + needle("app key")] == needle("app value")
    (answer,) = ok(client.post("/run", json=message("again")))
    assert answer["content"]["parts"][0]["text"] == "Message 3: I have noted 'again'."
    load_files(client)
    # `preload_memory_tool` searches for the words of a message.  Both messages of `begin` have it.
    ok(client.post(SESSIONS, json={"sessionId": "later"}))
    (answer,) = ok(client.post("/run", json=message(needle("text"), sessionId="later")))
    earlier = f" Earlier, you said '{needle('text')}'."
    assert answer["content"]["parts"][0]["text"].endswith(f"'{needle('text')}'.{2 * earlier}")


@pytest.mark.soak  # docs/adk-commands.md starts `adk web` with both files
def test_services_yaml_or_py_makes_adk_api_server_store_ciphertext_only(place: Place) -> None:
    (place.agents / "services.yaml").write_text(SERVICES_YAML)
    command = ("adk", "api_server", *OPTIONS, "agents")
    with place.serve(*command) as client:
        begin(client)
    assert place.status == -signal.SIGTERM
    assert place.names() == STORED
    (place.agents / "services.yaml").unlink()
    (place.agents / "services.py").write_text(SERVICES_PY)
    with place.serve(*command, end=signal.SIGINT) as client:
        go_on(client)
    assert place.names() == STORED
    assert place.needles() == IN_ACCESS_LOG


@pytest.mark.soak
def test_services_py_makes_adk_run_store_ciphertext_only(place: Place) -> None:
    (place.agents / AGENT / "services.py").write_text(SERVICES_PY)
    said = f"{needle('text')}\nonce more\nexit\n"
    done = place.run("adk", "run", *OPTIONS, f"agents/{AGENT}", said=said)
    assert done.returncode == 0, done.stderr
    assert "Message 2: I have noted 'once more'." in done.stdout
    assert {Path(name).parts[0] for name in place.files()} == {"log", "sessions.db", "tmp"}
    assert place.needles() == {}


def test_own_command_runs_adk_web_without_a_needle_in_its_files_and_logs(place: Place) -> None:
    command = ("adk-secure-sessions", "adk", "web", *OURS, *SAVE_FILES, "agents")
    with place.serve(*command) as client:
        begin(client)
        send_file(client)
        reject_evaluations(client)
        reject_long_ids(client)
        connect_live(client)
        break_the_store(client, place)
        assert place.needles() == {}  # while it runs, with the write-ahead log
    assert place.status == -signal.SIGTERM
    assert place.names() == STORED
    assert place.needles() == {}
    assert "/users/.../sessions/... " in place.logged()
    assert '"WebSocket /run_live?..."' in place.logged()
    assert "/users/.../sessions/.../artifacts/... " in place.logged()


def reject_evaluations(client: httpx.Client) -> None:
    """Try to copy the session into an eval set and into a test, as the page does."""
    session = ok(client.get(f"{SESSIONS}/{SESSION}"))
    case = {"evalId": "case", "sessionId": SESSION, "userId": USER}
    for prefix in ("/dev", ""):  # google-adk 2 and 1
        path = f"{prefix}/apps/{AGENT}"
        for method, name, content in (
            ("POST", "eval-sets", {"evalSet": {"evalSetId": "e", "evalCases": []}}),
            ("POST", "eval-sets/e/add-session", case),
            ("PUT", "tests/t", {"sessionData": session}),
        ):
            answer = client.request(method, f"{path}/{name}", json=content)
            assert answer.status_code == 403
            assert "--allow-plaintext evaluations" in answer.json()["detail"]


def reject_long_ids(client: httpx.Client) -> None:
    for answer in (
        client.post(SESSIONS, json={"sessionId": "x" * 1025}),
        client.get(f"{SESSIONS}/{'x' * 1025}"),
        client.delete(f"{SESSIONS}/{'x' * 1025}"),
    ):
        assert answer.status_code == 400
        assert answer.json() == {"detail": "session_id has more than 1024 bytes in UTF-8"}


def connect_live(client: httpx.Client) -> None:
    """Open a WebSocket: uvicorn writes its address into another log than its access log."""
    ids = f"app_name={AGENT}&user_id={USER}&session_id={SESSION}"
    address = f"{client.base_url}/run_live?{ids}".replace("http", "ws", 1).replace("//run", "/run")
    with connect(address, origin=Origin(str(client.base_url).rstrip("/"))):
        pass


def break_the_store(client: httpx.Client, place: Place) -> None:
    """Save an artifact while nothing can be stored: google-adk logs the error."""
    store = place.directory / "artifacts"
    store.rename(place.directory / "away")
    store.touch()
    assert client.post(ARTIFACTS, json=upload(FILE, 2)).status_code == 500
    store.unlink()
    (place.directory / "away").rename(store)
    assert "saving artifact ... for app=" in place.logged()
    load_files(client)


def send_file(client: httpx.Client) -> None:
    """Attach a file to a message, as the page does; a plugin of google-adk makes it an artifact."""
    file = upload("", 0)["artifact"]
    file["inlineData"]["displayName"] = needle("file name")
    said = {"role": "user", "parts": [{"text": "here"}, file]}
    ok(client.post("/run", json=message("", newMessage=said)))
    loaded = ok(client.get(f"{ARTIFACTS}/{needle('file name')}"))
    assert loaded == file


@pytest.mark.soak
@pytest.mark.skipif(chromium.PROGRAM is None, reason="chromium is not installed")
def test_page_of_adk_web_shows_the_session_after_a_reload(place: Place) -> None:
    answered = f"I have noted '{needle('text')}'."
    with (
        place.serve("adk-secure-sessions", "adk", "web", *OURS, "agents") as client,
        chromium.browser() as tab,
    ):
        tab.open(f"{client.base_url}/dev-ui/?app={AGENT}&userId={USER}")
        tab.send("textarea", needle("text"))
        tab.wait_for(answered)
        address = tab.evaluate("location.href")
        tab.open("about:blank")
        tab.open(address)
        tab.wait_for(answered)
    assert place.needles() == {}


@pytest.mark.soak
def test_own_command_runs_adk_run_and_ends_with_the_input(place: Place) -> None:
    command = ("adk-secure-sessions", "adk", "run", *OURS, f"agents/{AGENT}")
    done = place.run(*command, said=f"{needle('text')}\n")
    assert done.returncode == 130, done.stderr
    assert "Message 1: I have noted" in done.stdout
    assert "Traceback" not in done.stderr
    assert "sessions.db" in place.files()
    assert place.needles() == {}


@pytest.mark.soak
@pytest.mark.parametrize("name", ["postgresql", "mariadb"])
def test_adk_api_server_stores_in_a_database_server(
    place: Place, name: str, request: pytest.FixtureRequest
) -> None:
    (place.agents / "services.py").write_text(SERVICES_PY)
    with request.getfixturevalue(name).database() as url:
        text = url.set(drivername=name).render_as_string(hide_password=False)
        text += f"{'&' if '?' in text else '?'}key=env:{KEY_VARIABLE}"
        uri = f"encrypted+{text}&blobs=./artifacts"
        command = ("adk", "api_server", *(uri if text == URI else text for text in OPTIONS))
        for drive in (begin, go_on):
            with place.serve(*command, "agents") as client:
                drive(client)
            assert place.status == -signal.SIGTERM
        assert "Traceback" not in place.logged()
        assert place.names() == {"artifacts", "log"}


# --- what must not become plaintext ---------------------------------------------------------------


@pytest.mark.soak
def test_services_py_that_raises_does_not_make_adk_store_plaintext(place: Place) -> None:
    """google-adk logs a warning and goes on; it then resolves the URI itself, and must fail."""
    (place.agents / AGENT / "services.py").write_text("raise RuntimeError\n" + SERVICES_PY)
    done = place.run("adk", "run", *OPTIONS, f"agents/{AGENT}", said="hello\nexit\n")
    assert done.returncode != 0
    assert not [name for name in place.files() if name.endswith(".db")]
