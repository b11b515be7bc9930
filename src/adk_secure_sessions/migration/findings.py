"""The findings of a run: the sessions, states and artifacts that need attention."""

import time
from typing import NamedTuple, TypeVar

from adk_secure_sessions.maintenance.problems import CappedList

T = TypeVar("T")


class StopAtBad(Exception):
    """A session or state cannot be copied or exported, and `skip_bad` is False."""


class Finding(NamedTuple):
    """A session, the state of a user or an app, or an artifact, that needs attention.

    Attributes:
        kind: `session`, `user`, `app` or `artifact`.
        tag: The blind index, in hexadecimal, in the target or, of an export, in the database that
            is read; empty if the target has no keys yet, or if the ids cannot be decrypted.
        detail: What was found, without content.
        app_name: The app; None unless readable ids were requested.
        user_id: The user; None for an app, or unless readable ids were requested.
        session_id: The session; None for a user, an app or an artifact of a user, or unless
            readable ids were requested.
        filename: The name of an artifact; None otherwise, or unless readable ids were requested.
    """

    kind: str
    tag: str
    detail: str
    app_name: str | None = None
    user_id: str | None = None
    session_id: str | None = None
    filename: str | None = None

    def __repr__(self) -> str:  # without the ids
        return f"<{self.kind} {self.tag}: {self.detail}>"

    @property
    def line(self) -> str:
        ids = ", ".join(repr(name) for name in self[3:] if name is not None)
        return f"{self.kind} {self.tag or '(unknown)'}{ids and f' ({ids})'}: {self.detail}"


class Findings(CappedList[Finding]):
    """Counts the findings of a run that begins now, and keeps the first 1000.

    With *with_ids*, they contain readable ids.
    """

    def __init__(self, *, with_ids: bool) -> None:
        super().__init__()
        self._with_ids = with_ids
        self._began = time.monotonic()

    def copy_into(self, result: T) -> T:
        """Set the fields `findings` and `seconds` of *result*, and return it."""
        seconds = time.monotonic() - self._began
        vars(result).update(findings=tuple(self.first), seconds=seconds)
        return result

    def add(self, tag: bytes, detail: str, *ids: str | None) -> None:
        """Add a finding; *ids* are the app, the user, the session and the name, or fewer."""
        kind = ("app", "user", "session", "artifact")[len(ids) - 1]
        self.append(Finding(kind, tag.hex(), detail, *(ids if self._with_ids else ())))
