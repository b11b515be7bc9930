"""With cached events, the database sends the same amount of data however long the session is."""

from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import URL

from adk_secure_sessions import AesGcmBackend, Caches, EncryptedSessionService
from tests.conformance.services import KEY
from tests.conformance.support import APP, USER, each_kind, event
from tests.faults import Point, with_faults

kind = each_kind(
    *("encrypted-file", "encrypted-postgresql"), soak=["encrypted-psycopg", "encrypted-mariadb"]
)


def size(answers: list[Sequence[Any]]) -> tuple[int, int, int]:
    """The number of queries, of the rows that they returned, and of the bytes in the rows."""
    rows = [row for answer in answers for row in answer]
    values = [value for row in rows for value in row if isinstance(value, bytes | str)]
    return len(answers), len(rows), sum(map(len, values))


@pytest.mark.parametrize("new", [0, 1, 5])
async def test_transfer_does_not_depend_on_the_number_of_known_events(url: URL, new: int) -> None:
    text = url.render_as_string(hide_password=False)
    service, faults = with_faults(
        lambda: EncryptedSessionService(text, AesGcmBackend(KEY), cache=Caches(events=10**7))
    )
    answers: list[Sequence[Any]] = []

    def note(_step: object, answer: Sequence[Any]) -> bool:
        answers.append(answer)
        return False

    faults.data.after(Point.READ, lambda: None, nth=None, when=note)
    sizes = []
    async with service, EncryptedSessionService(text, AesGcmBackend(KEY)) as another:
        for known in (3, 60):
            name = f"{known} events"
            session = await another.create_session(app_name=APP, user_id=USER, session_id=name)
            for number in range(known):
                await another.append_event(session, event(f"{number:04}"))
            ids: dict[str, Any] = {"app_name": APP, "user_id": USER, "session_id": name}
            assert await service.get_session(**ids)
            for number in range(known, known + new):
                await another.append_event(session, event(f"{number:04}"))
            answers.clear()
            assert await service.get_session(**ids) == session
            sizes.append(size(answers))
    (queries, rows, sent), more = sizes
    assert queries == 1
    assert more[:2] == (queries, rows)
    assert abs(more[2] - sent) < 10, "the id of the session has one digit more"
