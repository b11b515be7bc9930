"""Makes docs/img/adk-web.png: the page of `adk web` beside what the database holds.

    python examples/make_screenshot.py

Runs `adk-secure-sessions adk web` with examples/adk_agent, sends a message in headless Chromium,
and takes a picture of the page beside the row that stores the message.
"""

import base64
import html
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.chromium import Tab, browser  # noqa: E402
from tests.integrations.adk_processes import AGENT, URI, Place  # noqa: E402

PICTURE = ROOT / "docs" / "img" / "adk-web.png"
WIDTH, HEIGHT = 1000, 620
MESSAGE = "My blood group is AB negative."
# The page takes the font of its icons from another server.
WITHOUT_ICONS = "mat-icon, .material-symbols-outlined { visibility: hidden }"


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        place = Place(Path(directory))
        command = ("adk-secure-sessions", "adk", "web", "agents")
        with place.serve(*command, "--service_uri", URI) as client, browser(WIDTH, HEIGHT) as tab:
            page = picture_of_page(tab, str(client.base_url))
            rows = stored(place.directory / "sessions.db")
            picture = picture_of_both(tab, page, rows)
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_bytes(picture)


def picture_of_page(tab: Tab, url: str) -> bytes:
    tab.open(f"{url}/dev-ui/?app={AGENT}&userId=ada")
    tab.send("textarea", MESSAGE)
    tab.wait_for("I have noted")
    tab.evaluate("document.querySelector('textarea').value = ''")
    tab.evaluate(
        "document.head.appendChild(document.createElement('style')).textContent = "
        f"'{WITHOUT_ICONS}'"
    )
    return tab.picture()


def stored(path: Path) -> list[tuple[str, bytes]]:
    """The encrypted values of the database, each with the name of its column."""
    with closing(sqlite3.connect(path)) as connection:
        (state,) = connection.execute("SELECT state FROM secure_users").fetchone()
        events = connection.execute("SELECT event FROM secure_events ORDER BY seq").fetchall()
    return [("secure_users.state", state), *(("secure_events.event", event) for (event,) in events)]


def picture_of_both(tab: Tab, page: bytes, rows: list[tuple[str, bytes]]) -> bytes:
    shown = "".join(
        f"<h2>{name}, {len(value)} bytes</h2><p>{html.escape(value[:160].hex(' ', -2))} ...</p>"
        for name, value in rows
    )
    text = (
        "<style>body { margin: 0; display: flex; background: #fff; font-family: sans-serif }"
        f"img {{ width: {WIDTH}px }} div {{ width: 440px; padding: 0 20px }}"
        "h1 { font-size: 20px } h2 { font-size: 15px; margin: 18px 0 6px }"
        "p { font: 13px/1.45 monospace; margin: 0; word-break: break-word }</style>"
        f"<img src='data:image/png;base64,{base64.b64encode(page).decode()}'>"
        f"<div><h1>sessions.db</h1>{shown}</div>"
    )
    tab.call(
        "Emulation.setDeviceMetricsOverride",
        width=WIDTH + 480, height=HEIGHT, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip
    frame = tab.call("Page.getFrameTree")["frameTree"]["frame"]["id"]
    tab.call("Page.setDocumentContent", frameId=frame, html=text)
    tab.wait_until("document.images.length == 1 && document.images[0].complete")
    return tab.picture()


if __name__ == "__main__":
    main()
