"""What the tests of this folder share: on which services a test runs, and short calls.

How it works.  Every test takes the fixture `service` (or `kind` and `url`).  So it runs once for
each service that its file lists with `each_kind`: ADK's own `DatabaseSessionService`, which is the
reference, and ours on each kind of database (`services.KINDS`).  A test states what ADK's contract
demands.  Where the reference does less, a mark says so and why: `@reference_lacks` if the installed
release is too old, `@reference_fails` if it has a bug that ours must not have, `@only_ours` if the
point does not exist there.  The rest of the module abbreviates calls: `create(service)`,
`reload(service, session)`, `event("text", delta={...})`.
"""

import asyncio
import itertools
import re
from collections.abc import Awaitable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import google.adk.errors
import google.adk.version
import pytest
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import BaseSessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types

from tests.conformance.services import KINDS, MAIN_KINDS, NTH_CASES, WRAPPERS, Kind

APP = "app"
USER = "user"
START = 1_700_000_000.0

T = TypeVar("T")

_release = re.match(r"(\d+)\.(\d+)", google.adk.version.__version__)
assert _release, google.adk.version.__version__
ADK = (int(_release[1]), int(_release[2]))
NEWEST_READ = (2, 13)  # the release whose source the suite was written against

# ADK has a class for it from 2.7 on; before, the plain ValueError.
STALE: type[Exception] = getattr(google.adk.errors, "StaleSessionError", ValueError)

_ticks = itertools.count()


def reference_lacks(what: str, *, seen_in: tuple[int, int] = NEWEST_READ) -> pytest.MarkDecorator:
    """Skip the reference before *seen_in*, the oldest release of ADK known to have it."""
    return pytest.mark.reference("skip", f"ADK {ADK[0]}.{ADK[1]}: {what}", ADK < seen_in)


def reference_fails(why: str, *, fixed_in: tuple[int, int] | None = None) -> pytest.MarkDecorator:
    """Expect the reference to fail, before *fixed_in* if that is known; ours must pass."""
    return pytest.mark.reference("xfail", why, fixed_in is None or ADK < fixed_in)


def only_ours(why: str) -> pytest.MarkDecorator:
    """Skip the reference on every release."""
    return pytest.mark.reference("skip", why, True)


def each_kind(
    *names: str, some: Mapping[str, Collection[str]] | None = None, soak: Collection[str] = ()
) -> Any:
    """Make the fixture `kind`: a file assigns it to list the services that its tests run on.

    By default *names*, and each kind of *some* for the tests that it lists; under `make soak` also
    the other tests on these, and those of *soak*.  In this folder, `choose` has two more rules.
    """
    some = some or {}
    params = [
        *(_param(name) for name in names),
        *(_param(name, pytest.mark.some_tests(*tests)) for name, tests in some.items()),
        *(_param(name, pytest.mark.soak) for name in soak),
    ]

    @pytest.fixture(params=params)
    def kind(request: pytest.FixtureRequest) -> Kind:
        kind = {**KINDS, **WRAPPERS}[request.param]
        if kind.is_reference:
            for mark in request.node.iter_markers("reference"):
                outcome, why, applies = mark.args
                if applies and outcome == "skip":
                    pytest.skip(why)
                if applies:
                    request.applymarker(pytest.mark.xfail(reason=why, strict=False))
        return kind

    return kind


def _param(name: str, *marks: pytest.MarkDecorator) -> Any:
    # Coverage doubles the time, and these run no code of ours that the main kinds do not.
    extra = name not in WRAPPERS and (KINDS[name].is_reference or name not in MAIN_KINDS)
    return pytest.param(name, marks=[*marks, *([pytest.mark.no_cover] if extra else [])])


def choose(items: Iterable[pytest.Item]) -> None:
    """Mark with `soak` which tests of this folder a kind does not run by default.

    1. Tests that the file does not list for a kind of `some`.
    2. All cases of a parametrized test but the first, or but every nth on the kinds of `NTH_CASES`.
    3. Tests that the reference is expected to fail.
    """
    cases: dict[tuple[str, str, str], int] = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        name = params.get("kind") or params.get("_kind")
        if not isinstance(item, pytest.Function) or name is None:
            continue
        listed = item.get_closest_marker("some_tests")
        unknown = [test for test in listed.args if not hasattr(item.module, test)] if listed else []
        assert not unknown, f"{item.path}: {unknown}"
        case = cases.get(test := (item.path.name, item.originalname, name), 0)
        cases[test] = case + 1
        if (
            (listed and item.originalname not in listed.args)
            or (case % NTH_CASES[name] if name in NTH_CASES else case)
            or ({**KINDS, **WRAPPERS}[name].is_reference and _is_expected_to_fail(item, name))
        ):
            item.add_marker(pytest.mark.soak)


def _is_expected_to_fail(item: pytest.Function, name: str) -> bool:
    failures = getattr(item.module, "failures", None)  # of test_wrapper.py
    return any(
        outcome == "xfail" and applies
        for outcome, _, applies in (mark.args for mark in item.iter_markers("reference"))
    ) or bool(failures and failures(name, item.originalname))


def not_found(kind: Kind) -> type[Exception]:
    """The error of appending to an unknown session; older releases of ADK have no class for it."""
    return ValueError if kind.is_reference and ADK < NEWEST_READ else SessionNotFoundError


@contextmanager
def rejected_as_stale() -> Iterator[None]:
    """Expect the error that a stale session object is rejected with."""
    with pytest.raises(STALE) as rejection:
        yield
    assert not isinstance(rejection.value, SessionNotFoundError)  # a ValueError, too


def event(text: str | None = None, *, delta: dict[str, Any] | None = None, **fields: Any) -> Event:
    """A new event, a quarter of a second later than the last: every release stores that exactly."""
    fields.setdefault("timestamp", START + next(_ticks) / 4)
    fields.setdefault("author", "agent")
    fields.setdefault("invocation_id", "invocation")
    if text is not None:
        fields["content"] = types.Content(role="model", parts=[types.Part(text=text)])
    if delta is not None:
        fields["actions"] = EventActions(state_delta=delta)
    return Event(**fields)


async def together(*calls: Awaitable[T]) -> list[T]:
    """Like `asyncio.gather`, but raise the first error only when all calls have ended.

    A call of ADK's service that is still running would lose its connection with the event loop.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def create(
    service: BaseSessionService,
    session_id: str | None = "session",
    *,
    user_id: str = USER,
    app_name: str = APP,
    state: dict[str, Any] | None = None,
) -> Session:
    return await service.create_session(
        app_name=app_name, user_id=user_id, session_id=session_id, state=state
    )


async def find(service: BaseSessionService, session: Session, **config: Any) -> Session | None:
    return await service.get_session(
        app_name=session.app_name,
        user_id=session.user_id,
        session_id=session.id,
        config=GetSessionConfig(**config) if config else None,
    )


async def reload(service: BaseSessionService, session: Session, **config: Any) -> Session:
    found = await find(service, session, **config)
    assert found is not None, "the session is gone"
    return found


async def delete(service: BaseSessionService, session: Session) -> None:
    await service.delete_session(
        app_name=session.app_name, user_id=session.user_id, session_id=session.id
    )


async def listed(
    service: BaseSessionService, user_id: str | None = USER, app_name: str = APP
) -> list[Session]:
    return (await service.list_sessions(app_name=app_name, user_id=user_id)).sessions


def ids(events_or_sessions: list[Event] | list[Session]) -> list[str]:
    return [one.id for one in events_or_sessions]


def marker(session: Session) -> str | None:
    """ADK's marker of staleness, which it keeps in a private attribute."""
    return session._storage_update_marker
