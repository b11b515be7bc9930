"""Makes the picture of one conversation in two databases, from two real databases, at each build.

`python docs/hooks/two_databases.py > docs/two-databases.svg` makes the copy that the README shows.
"""

import asyncio
import re
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from html import escape
from pathlib import Path
from textwrap import wrap

from google.adk.events import Event
from google.adk.sessions import BaseSessionService
from google.adk.sessions.database_session_service import DatabaseSessionService
from google.genai import types

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService, generate_key

_IMAGE = re.compile(r'<img alt="[^"]*" src="two-databases\.svg" ?/?>')
_WIDTH, _LINES = 38, 3  # of a value: characters, and lines at most
_ADK = (
    ("sessions", "app_name", "user_id", "state"),
    ("events", "event_data"),
)
_OURS = (
    ("secure_apps", "app_name"),
    ("secure_users", "tag"),
    ("secure_sessions", "state"),
    ("secure_events", "event"),
)


async def _converse(service: BaseSessionService) -> None:
    session = await service.create_session(
        app_name="clinic", user_id="ada", state={"google_token": "ya29.a0AfB_byC"}
    )
    part = types.Part(text="I am allergic to penicillin.")
    await service.append_event(
        session, Event(author="user", content=types.Content(role="user", parts=[part]))
    )


async def _write(folder: Path) -> None:
    adk = DatabaseSessionService(f"sqlite+aiosqlite:///{folder}/adk.db")
    await _converse(adk)
    await adk.close()
    backend = AesGcmBackend(generate_key())
    async with EncryptedSessionService(f"sqlite:///{folder}/ours.db", backend) as ours:
        await _converse(ours)


def _lines(path: Path, tables: tuple[tuple[str, ...], ...]) -> Iterator[tuple[str, str]]:
    """Yield the class and the text of each line: the values of the first row of each table."""
    with closing(sqlite3.connect(path)) as connection:
        for table, *columns in tables:
            for column in columns:
                query = f"SELECT {column} FROM {table}"  # noqa: S608
                value = connection.execute(query).fetchone()[0]
                if isinstance(value, bytes):
                    value = value.decode() if value.isascii() and value.isalpha() else value.hex()
                yield "column", f"{table}.{column}"
                text = wrap(value, _WIDTH)
                if len(text) > _LINES:
                    text[_LINES - 1 :] = [text[_LINES - 1][: _WIDTH - 2] + " …"]
                yield from (("value", line) for line in text)


def _panel(x: int, title: str, lines: list[tuple[str, str]]) -> Iterator[str]:
    yield f'<text x="{x}" y="22" font-weight="600" font-size="14">{escape(title)}</text>'
    y = 30
    for kind, line in lines:
        y += 20 if kind == "column" else 16
        style = 'fill-opacity=".75"' if kind == "column" else 'font-family="monospace"'
        yield f'<text x="{x}" y="{y}" {style} xml:space="preserve">{escape(line)}</text>'


@cache
def picture() -> str:
    """Return the picture as SVG."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_write(Path(folder)))
        adk = list(_lines(Path(folder, "adk.db"), _ADK))
        ours = list(_lines(Path(folder, "ours.db"), _OURS))
    height = 44 + max(
        sum(20 if kind == "column" else 16 for kind, _ in side) for side in (adk, ours)
    )
    box = f'y="1" width="318" height="{height - 2}" rx="6" fill="currentColor" fill-opacity=".05"'
    panels = "\n".join(
        (
            *_panel(14, "ADK: DatabaseSessionService", adk),
            *_panel(354, "EncryptedSessionService", ours),
        )
    )
    return f"""\
<svg class="picture wide" tabindex="0" role="img" aria-labelledby="two-title two-text" \
xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 {height}" \
font-family="system-ui, sans-serif" font-size="12" fill="currentColor">
<style>.picture{{color:#222}}@media (prefers-color-scheme:dark){{.picture{{color:#ccc}}}}</style>
<title id="two-title">The same conversation in two databases</title>
<desc id="two-text">In the database of ADK, the token in the state and the text of the event can \
be read. In the encrypted database, only the name of the app can be read.</desc>
<rect x="1" {box} stroke="currentColor"/>
<rect x="341" {box} stroke="currentColor"/>
{panels}
</svg>
"""


def on_page_content(html: str, **_: object) -> str:
    """See https://www.mkdocs.org/user-guide/configuration/#hooks."""
    return _IMAGE.sub(lambda _: picture(), html)


if __name__ == "__main__":
    sys.stdout.write(picture())
