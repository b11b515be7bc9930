"""AdkTables yields what google-adk's own services return for the same rows."""

import asyncio
import math
import pickle
import sqlite3
import sys
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from google.adk.events import EventActions
from google.adk.sessions import DatabaseSessionService
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import ConfigurationError, DatabaseError
from adk_secure_sessions.formats.json_text import load_state
from adk_secure_sessions.migration import Package1xTables, adk_queries, open_source
from adk_secure_sessions.migration.adk_queries import ADK_TABLES, TableKind, kinds_in
from adk_secure_sessions.migration.adk_tables import AdkTables
from adk_secure_sessions.migration.sources import Selection, SessionContent, Unreadable
from tests.conformance import samples, values
from tests.conformance.support import ADK
from tests.migration.adk_sources import (
    ORDERS_TIES,
    READS_V0,
    START,
    Adk,
    adk,
    append,
    assert_same_as_adk,
    contents,
    decoded,
    each_kind,
    fill,
    frozen_v0,
    listed,
    one_pickle_reader,
    said,
    setting,
    states_of,
)

__all__ = ["adk"]

# google-adk itself calls a deprecated method when it makes an AuthConfig.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


async def detect(url: Any = None, **options: Any) -> frozenset[TableKind]:
    async with AdkTables(url, **options) as source:
        return await source.run_without_snapshot(kinds_in)


# Schema v0 needs a process that loads pickles, which takes seconds: see `in_v0`.
SERVERS = ["v0-sqlite", "v1-mysql", "v1-mariadb", "v1-psycopg", "v0-postgresql", "v0-mysql"]
kind = each_kind("v1-sqlite", "v1-postgresql", "sqlite-service", soak=SERVERS)
in_v0 = pytest.mark.parametrize(
    "kind",
    [
        *("v1-sqlite", "v1-postgresql", "v0-sqlite", "sqlite-service"),
        *(pytest.param(name, marks=pytest.mark.soak) for name in SERVERS[1:]),
    ],
)
# Another database or schema makes no difference to these tests.
in_files = pytest.mark.parametrize(
    "kind",
    [
        *("v1-sqlite", "sqlite-service"),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ["v1-postgresql", *SERVERS]),
    ],
)
json_kinds = pytest.mark.parametrize("kind", ["v1-sqlite", "sqlite-service"])

IDS = ["", " padded", "Grüße 世界 🎉", "o'%_\\\"\n", "x" * 128, "null", "\u00e9", "e\u0301"]


# --- contents ------------------------------------------------------------------------------------


@in_v0
async def test_every_field_of_an_event_is_read(adk: Adk) -> None:
    given = dict(samples.of_every_field()) | {name: make() for name, make in samples.CORPUS.items()}
    session = await fill(adk.service)
    stored = 0
    for event in given.values():
        try:
            session = await append(adk.service, session, event)
            stored += not event.partial
        except Exception:  # for example, PostgreSQL rejects the character NUL
            continue
    assert stored > len(given) / 3
    async with adk.source() as source:
        assert await assert_same_as_adk(adk.service, source) == stored


async def test_states_of_every_json_type_are_read(adk: Adk) -> None:
    stored = 0
    for number, (name, value) in enumerate(values.PLAIN.items()):
        if number and adk.is_postgresql and name in ("nul", "lone-surrogate"):
            continue
        state = {"k": value, "user:u": [value], f"app:{name}": {"": value}}
        try:
            await fill(adk.service, user_id=f"u{number}", session_id="s", state=state)
            stored += 1
        except Exception:  # for example, PostgreSQL rejects NaN
            continue
    assert stored > len(values.PLAIN) / 2
    async with adk.source() as source:
        assert len(await listed(source)) == stored
        await assert_same_as_adk(adk.service, source)


async def test_tasks_that_are_first_at_the_same_time_share_one_process(adk: Adk) -> None:
    async with adk.source() as source:
        first, *others = await asyncio.gather(*(source.queries() for _ in range(3)))
        assert all(one is first for one in others)


async def test_odd_ids_are_read(adk: Adk) -> None:
    for odd in IDS:
        await fill(adk.service, [setting(START, **{"user:k": odd})], app_name=odd, user_id=odd)
        await fill(adk.service, [said(id=odd or "e", invocation_id=odd)], session_id=odd or None)
    async with adk.source() as source:
        assert len(await listed(source)) == 2 * len(IDS)
        assert await assert_same_as_adk(adk.service, source) == 2 * len(IDS)


@pytest.mark.skipif(not ORDERS_TIES, reason="the order of equal times was undefined")
async def test_events_are_in_the_order_of_google_adk(adk: Adk) -> None:
    times = [5.0, 1.0, 1.0, 1.0, 3.000001, 3.0, 1.0]
    ids = ["e", "b", "B2", "a-1", "a", "a_1", "ä2"]
    history = [
        said(f"{n}", id=id_, at=START + time)
        for n, (id_, time) in enumerate(zip(ids, times, strict=True))
    ]
    session = await fill(adk.service)
    for event in history:
        session = await append(adk.service, session, event)
    async with adk.source() as source:
        assert await assert_same_as_adk(adk.service, source) == len(history)


@in_files
async def test_sessions_without_events_and_states_without_sessions_are_read(adk: Adk) -> None:
    await fill(adk.service)
    gone = await fill(adk.service, app_name="gone", state={"app:a": 1, "user:u": 2})
    await adk.service.delete_session(app_name="gone", user_id="user", session_id=gone.id)
    await fill(adk.service, app_name="other", user_id="else")
    async with adk.source() as source:
        assert [one.app_name for one in await listed(source)] == ["app", "other"]
        assert await assert_same_as_adk(adk.service, source) == 0
        apps, users = await states_of(source)
        assert (apps["gone"], users["gone", "user"]) == ({"a": 1}, {"u": 2})
        assert await states_of(source, Selection("gone")) == (
            {"gone": {"a": 1}},
            {("gone", "user"): {"u": 2}},
        )
        assert [one.app_name for one in await listed(source, Selection("other"))] == ["other"]


async def test_scope_selects_sessions_by_last_update(adk: Adk) -> None:
    for number in range(4):
        await fill(adk.service, [said(at=START + number)], session_id=f"s{number}")
    await fill(adk.service, [said(at=START + 9)], app_name="other", session_id="o")
    async with adk.source() as source:
        selection = Selection(since=round((START + 2) * 1e6))
        assert [one.session_id for one in await listed(source, selection)] == ["s2", "s3", "o"]
        assert await source.count(selection) == 3
        selection = Selection("app", round((START + 1) * 1e6))
        assert [one.session_id for one in await listed(source, selection)] == ["s1", "s2", "s3"]
        assert await source.count(selection) == 3
        assert await source.count(Selection("app")) == 4
        assert await source.count(Selection()) == 5
        with pytest.raises(ConfigurationError, match="years 2 to 9998"):
            await source.count(Selection(since=-(10**18)))


async def test_version_changes_with_every_change(adk: Adk) -> None:
    session = await fill(adk.service, session_id="s")
    etags = set()
    async with adk.source() as source:
        for time in (START, START, START + 1, START + 1):
            etags.add((await listed(source))[0].etag)
            again = (await listed(source))[0].etag
            assert again in etags
            session = await append(adk.service, session, said(at=time))
        etags.add((await listed(source))[0].etag)
        await adk.service.delete_session(app_name="app", user_id="user", session_id="s")
        await fill(adk.service, session_id="s")
        etags.add((await listed(source))[0].etag)
    # With a URL that begins with mariadb, google-adk stores whole seconds.
    assert len(etags) >= (5 if adk.kind == "v1-mariadb" else 6)


@in_files
async def test_session_that_was_deleted_meanwhile_is_omitted(adk: Adk) -> None:
    for name in ("a", "b"):
        await fill(adk.service, [said()], session_id=name)
    async with adk.source() as source:
        sessions = await listed(source)
        await adk.service.delete_session(app_name="app", user_id="user", session_id="a")
        found = await source.read(sessions)
        assert [one.session_id for one in found] == ["b"]
        assert await source.read([]) == {}


@in_v0
async def test_temporary_keys_of_early_releases_are_left_out(adk: Adk) -> None:
    if adk.kind.startswith("v0"):
        pickled = pickle.dumps(EventActions(state_delta={"k": 1, "temp:t": 2}))
        await fill(adk.service, [said()])
        adk.run("UPDATE events SET actions = :pickled", {"pickled": pickled})
    else:
        await fill(adk.service, [setting(**{"k": 1, "user:tamp:t": 2})])
        column = "CAST(event_data AS text)" if adk.is_postgresql else "event_data"
        changed = f"replace({column}, 'user:tamp:', 'temp:')"
        changed = f"CAST({changed} AS jsonb)" if adk.is_postgresql else changed
        adk.run(f"UPDATE events SET event_data = {changed.replace(':', chr(92) + ':')}")
    async with adk.source() as source:
        (content,) = (await contents(source)).values()
    assert decoded(content)[0].actions.state_delta == {"k": 1}


@pytest.mark.skipif(ADK < (2, 7), reason="DatabaseSessionService rejects such a file")
@pytest.mark.parametrize("kind", ["sqlite-service"])
async def test_file_that_both_services_of_google_adk_wrote_is_read(adk: Adk) -> None:
    for name in ("a", "b"):
        state = {"app:a": 1, "user:u": 1}  # DatabaseSessionService demands rows of states
        await fill(adk.service, [said(at=START)], session_id=name, state=state)
    service = DatabaseSessionService(adk.url.render_as_string())
    session = await service.get_session(app_name="app", user_id="user", session_id="a")
    assert session is not None
    await service.append_event(session, said(at=START + 1))
    await fill(service, [said(at=START)], session_id="c")
    async with adk.source() as source:
        assert await assert_same_as_adk(service, source) == 4
        assert source.description == TableKind.ADK_V1
        selection = Selection(since=round((START + 0.5) * 1e6))
        assert [one.session_id for one in await listed(source, selection)] == ["a"]
    await service.db_engine.dispose()


# --- many rows -----------------------------------------------------------------------------------


def json_parameter(adk: Adk) -> str:
    return "CAST(:data AS jsonb)" if adk.is_postgresql else ":data"


def insert_sessions(adk: Adk, number: int) -> None:
    time = START if adk.kind == "sqlite-service" else "2026-01-01 00:00:00.000000"
    adk.run(
        "INSERT INTO sessions (app_name, user_id, id, state, create_time, update_time) "
        "VALUES ('app', :user, :id, '{}', :time, :time)",
        *({"user": f"u{n % 7}", "id": f"s{n}", "time": time} for n in range(number)),
    )


def insert_events(adk: Adk, session_id: str, number: int, text: str = "hello") -> None:
    adk.run(
        "INSERT INTO events "
        "(app_name, user_id, session_id, id, invocation_id, timestamp, event_data) "
        f"VALUES ('app', 'u0', '{session_id}', :id, 'i', :time, {json_parameter(adk)})",
        *(
            {
                "id": f"e{n}",
                "time": START + n
                if adk.kind == "sqlite-service"
                else f"2026-01-01 00:00:{n // 97 % 60:02}.{n:06}",
                "data": said(text, id=f"e{n}", at=START + n).model_dump_json(exclude_none=True),
            }
            for n in range(number)
        ),
    )


@pytest.mark.parametrize(
    "kind",
    [
        "v1-sqlite",
        pytest.param("v1-postgresql", marks=pytest.mark.soak),
        pytest.param("v1-mysql", marks=pytest.mark.soak),
    ],
)
async def test_every_session_of_many_pages_is_read_once(adk: Adk) -> None:
    number = 2 * adk_queries.SESSION_PAGE + 3
    insert_sessions(adk, number)
    async with adk.source() as source:
        found = await listed(source)
        assert len(found) == len(set(found)) == number
        sizes = [len(batch) async for batch in source.sessions(Selection())]
        assert max(sizes) <= 500
        assert len(sizes) < number / 300


@pytest.mark.parametrize("kind", ["v1-sqlite"])
async def test_batch_of_large_sessions_is_small(adk: Adk) -> None:
    insert_sessions(adk, 10)
    for name in ("s0", "s7"):
        insert_events(adk, name, 4, "x" * 900_000)
    async with adk.source() as source:
        batches = [
            [one.session_id for one in batch] async for batch in source.sessions(Selection())
        ]
    assert [len(batch) for batch in batches] == [1, 9]


# --- rows that other programs have changed -----------------------------------------------------


# Changes of the row of an event whose id, invocation id and time are e, i and START.
CHANGES = {
    "another id": "id = 'another'",
    "another invocation": "invocation_id = 'another'",
    "another time": "timestamp = :time",
    "another type of time": '{"author": "a", "invocation_id": "i", "id": "e", "timestamp": 2}',
    "alias": '{"author": "a", "invocationId": "x", "id": "e", "timestamp": 1.5}',
    "unknown field": '{"author": "a", "id": "e", "invocation_id": "i", "timestamp": 2, "x": [1]}',
    "field twice": '{"author": "a", "id": "e", "invocation_id": "i", "timestamp": 2,'
    ' "author": "b"}',
    "spaces": ' {"author":"a" ,\n"id":"e","invocation_id":"i","timestamp":2e0,"branch":"\\u00fc"} ',
    "text for a flag": '{"author": "a", "id": "e", "timestamp": "2", "turn_complete": "yes"}',
    "null fields": '{"author": "a", "id": "e", "timestamp": 2, "branch": null,'
    ' "content": {"parts": [{"text": "t", "thought": null}]}, "custom_metadata": {"a": null}}',
    "only a time": '{"author": "a", "timestamp": 1}',
    "no fields": "{}",
    "NULL": "event_data = NULL",
    "time of null": '{"author": "a", "timestamp": null}',
}


@pytest.mark.skipif(ADK < (2, 7), reason="the column was used for the time of an event")
@pytest.mark.parametrize(
    "kind",
    ["v1-sqlite", "v1-postgresql", pytest.param("v1-mysql", marks=[pytest.mark.soak])],
)
async def test_columns_override_fields_as_in_google_adk(adk: Adk) -> None:
    for name in CHANGES:
        await fill(adk.service, [said(id="e", at=START)], session_id=name)
    for name, change in CHANGES.items():
        parameters: dict[str, object] = {"name": name}
        if ":time" in change:
            parameters["time"] = datetime(2025, 1, 2, 3, 4, 5, 678901)
        if change.lstrip().startswith("{"):
            parameters["data"] = change
            change = f"event_data = {json_parameter(adk)}"
        adk.run(f"UPDATE events SET {change} WHERE session_id = :name", parameters)
    async with adk.source() as source:
        assert await assert_same_as_adk(adk.service, source) == len(CHANGES)


@pytest.mark.parametrize("kind", ["sqlite-service"])
async def test_event_without_id_and_time_gets_those_of_its_row(adk: Adk) -> None:
    await fill(adk.service, [said(id="e", at=START)])
    adk.run("""UPDATE events SET event_data = '{"author"\\: "a"}'""")
    async with adk.source() as source:
        (content,) = (await contents(source)).values()
    (event,) = decoded(content)
    assert (event.id, event.timestamp, event.author) == ("e", START, "a")


@pytest.mark.parametrize("kind", ["v1-sqlite", "sqlite-service"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
async def test_nan_and_infinity_are_read(adk: Adk, number: float) -> None:
    await fill(adk.service, [said(custom_metadata={"a": 1.5})], state={"n": number})
    adk.run(
        "UPDATE events SET event_data = replace(event_data, '1.5', :text)",
        {"text": {math.inf: "Infinity"}.get(number, "NaN")},
    )
    async with adk.source() as source:
        (content,) = (await contents(source)).values()
    assert isinstance(content, SessionContent)
    (event,) = decoded(content)
    assert event.custom_metadata is not None
    state = load_state(content.state)
    assert repr([event.custom_metadata["a"], state["n"]]) == repr([number, number])


@pytest.mark.parametrize("kind", ["v1-sqlite"])
async def test_times_without_fraction_and_in_seconds_are_read(adk: Adk) -> None:
    for name, time in (("a", "2026-01-02 03:04:05"), ("b", 1700000000.25), ("c", 1700000001)):
        await fill(adk.service, [said()], session_id=name)
        adk.run(
            "UPDATE sessions SET update_time = :time WHERE id = :id", {"time": time, "id": name}
        )
    async with adk.source() as source:
        if ADK >= (2, 7):
            await assert_same_as_adk(adk.service, source)
        found = await listed(source, Selection(since=1_700_000_001_000_000))
        assert [one.session_id for one in found] == ["a", "c"]


BAD_EVENTS = {
    "no JSON": "{a secret",
    "not an object": '["a secret"]',
    "of a later google-adk": '{"author": "a", "actions": {"a secret": 1}}',
    "wrong type": '{"author": {"a secret": 1}}',
    "too deep": '{"author": "a", "custom_metadata": ' + '{"a":' * 220 + "1" + "}" * 221,
    "too many digits": '{"author": "a", "custom_metadata": {"a": ' + "1" * 5000 + "}}",
}


@json_kinds
async def test_event_that_cannot_be_read_concerns_only_its_session(adk: Adk) -> None:
    for name, text in {**BAD_EVENTS, "good": ""}.items():
        await fill(adk.service, [said("a"), said("b", at=START + 1)], session_id=name)
        update = "UPDATE events SET event_data = :text WHERE session_id = :name AND timestamp = "
        latest = "(SELECT max(timestamp) FROM events WHERE session_id = :name)"
        if text:
            adk.run(update + latest, {"text": text, "name": name})
    async with adk.source() as source:
        found = {one.session_id: content for one, content in (await contents(source)).items()}
    assert isinstance(found.pop("good"), SessionContent)
    assert found.keys() == BAD_EVENTS.keys()
    for bad in found.values():
        assert isinstance(bad, Unreadable)
        assert "event 2 of 2" in bad.reason
        assert "secret" not in bad.reason


BAD_STATES = {
    "no JSON": b"{a secret",
    "not UTF-8": b'{"a": "\xff"}',
    "not an object": b"[1]",
    "null": b"null",
    "too deep": b'{"a secret": ' + b"[" * 195 + b"]" * 195 + b"}",
    "too many digits": b'{"a secret": ' + b"1" * 5000 + b"}",
    "long key": b'{"a secret' + b"x" * 9000 + b'": 1}',
}


@json_kinds
async def test_state_that_cannot_be_read_is_reported(adk: Adk) -> None:
    for name, data in BAD_STATES.items():
        state = {"user:u": 1, "app:a": 1}
        await fill(adk.service, app_name=name, session_id=name, state=state)
        for table in ("sessions", "app_states", "user_states"):
            update = f"UPDATE {table} SET state = CAST(:data AS TEXT) WHERE app_name = :name"
            adk.run(update, {"data": data, "name": name})
    await fill(adk.service, app_name="good")
    async with adk.source() as source:
        found = {one.app_name: content for one, content in (await contents(source)).items()}
        apps, users = await states_of(source)
    assert isinstance(found["good"], SessionContent)
    for name in BAD_STATES:
        for unreadable in (found[name], apps[name], users[name, "user"]):
            assert isinstance(unreadable, Unreadable), name
            assert "state" in unreadable.reason
            assert "secret" not in unreadable.reason


@json_kinds
async def test_other_unreadable_rows_are_reported(adk: Adk) -> None:
    for name in ("x" * 1025, "good"):
        await fill(adk.service, session_id=name)
    for name, value in (("a time", "'never'"), ("another time", "CAST(x'ff' AS TEXT)")):
        await fill(adk.service, session_id=name)
        adk.run(f"UPDATE sessions SET update_time = {value} WHERE id = :id", {"id": name})
    async with adk.source() as source:
        found = {one.session_id: content for one, content in (await contents(source)).items()}
    long = found["x" * 1025]
    for name in ("a time", "another time"):
        time = found[name]
        assert isinstance(time, Unreadable)
        assert "time" in time.reason
    assert isinstance(long, Unreadable)
    assert "session_id has more than 1024 bytes" in long.reason
    assert isinstance(found["good"], SessionContent)


@json_kinds
@pytest.mark.parametrize("table", ["sessions", "user_states", "app_states"])
async def test_rows_whose_names_are_not_text_are_named(adk: Adk, table: str) -> None:
    """SQLite sorts each BLOB after each text, so no page would have these rows."""
    await fill(adk.service, session_id="good", state={"user:u": 1, "app:a": 1})
    column = {"sessions": "id", "user_states": "user_id", "app_states": "app_name"}[table]
    for form, named in (("AS BLOB", f"{table} has \\(in row 1\\)"), ("|| x'ff' AS TEXT", "has")):
        adk.run(f"UPDATE {table} SET {column} = CAST({column} {form})")
        async with adk.source() as source:
            with pytest.raises(ConfigurationError, match=f"{named} .*not text in UTF-8"):
                await (listed if table == "sessions" else states_of)(source)


@json_kinds
async def test_rows_that_an_attacker_adds_while_the_source_is_open_do_not_make_it_endless(
    adk: Adk,
) -> None:
    """SQLite sorts each BLOB after each text, so each page would have these rows again."""
    await fill(adk.service, session_id="good")
    async with adk.source() as source:
        assert len(await listed(source)) == 1
        adk.run(
            "INSERT INTO sessions (app_name, user_id, id, state, create_time, update_time) "
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :n) "
            "SELECT app_name, CAST(i AS BLOB), id, state, create_time, update_time "
            "FROM sessions, n",
            {"n": max(adk_queries.LOOKUP_PAGE, adk_queries.SESSION_PAGE)},
        )
        async with asyncio.timeout(20):
            assert len(await listed(source)) == 1
            assert [len(batch) async for batch in source.sessions_of("app", None)] == [1]


@json_kinds
async def test_sessions_that_are_added_behind_the_last_do_not_make_a_listing_endless(
    adk: Adk,
) -> None:
    await fill(adk.service, session_id="good")
    added = 0
    async with adk.source() as source:
        async for _ in source.sessions(Selection()):
            added += 1
            adk.run(
                "INSERT INTO sessions (app_name, user_id, id, state, create_time, update_time) "
                "SELECT app_name, user_id, :id, state, create_time, update_time FROM sessions "
                "WHERE id = 'good'",
                {"id": f"z{added}"},
            )
            assert added < 5
    assert added == 1


# --- schema v0 -----------------------------------------------------------------------------------


@pytest.mark.skipif(not READS_V0, reason="this google-adk has no restricted unpickler")
async def test_database_of_google_adk_1_20_is_read(tmp_path: Path) -> None:
    with one_pickle_reader(), frozen_v0(tmp_path) as (url, returned):
        assert await detect(url) == {TableKind.ADK_V0}
        service = DatabaseSessionService(url.render_as_string())
        async with AdkTables(url) as source:
            found = {one.session_id: content for one, content in (await contents(source)).items()}
            apps, users = await states_of(source)
            assert await assert_same_as_adk(service, source) == 5
        assert apps == {"clinic": {"motd": {"en": "hello"}, "n": 1.5}, "shop": {}}
        assert users["shop", "carol"] == {"cart": [1]}
        assert users["clinic", "ålice"] == {"nickname": "Lin", "visits": 2}
        for name, session in returned.items():
            content = found[name]
            assert isinstance(content, SessionContent)
            assert content.updated_at == round(session["last_update_time"] * 1e6)
            # Released models have more fields today.
            for event, expected in zip(decoded(content), session["events"], strict=True):
                dumped = event.model_dump(mode="json", exclude_none=True)
                dumped["long_running_tool_ids"].sort()
                assert_contains(dumped, expected)
        zone = timezone(timedelta(hours=-5))  # of an old writer
        async with AdkTables(url, time_zone=zone) as source:
            local = {one.session_id: content for one, content in (await contents(source)).items()}
        await service.db_engine.dispose()
    for name, content in found.items():
        other = local[name]
        assert isinstance(content, SessionContent)
        assert isinstance(other, SessionContent)
        assert content.updated_at == other.updated_at  # always UTC in SQLite
        hours = {
            (b.time - a.time) / 3.6e9 for a, b in zip(content.events, other.events, strict=True)
        }
        assert hours <= {5}


def assert_contains(found: Any, expected: Any) -> None:
    """Compare JSON values; None in *expected* may be missing in *found*."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            assert_contains(found.get(key) if value is None else found[key], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_contains(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("kind", ["v0-sqlite"])
async def test_tables_of_early_releases_lack_columns(adk: Adk) -> None:
    await fill(adk.service, [said("hello", id="e")])
    for name in ("custom_metadata", "input_transcription", "long_running_tool_ids_json"):
        adk.run(f"ALTER TABLE events DROP COLUMN {name}")
    async with adk.source() as source:
        (content,) = (await contents(source)).values()
    (event,) = decoded(content)
    assert (event.id, event.timestamp, event.custom_metadata) == ("e", START, None)


async def test_release_without_restricted_unpickler_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google.adk.sessions._restricted_pickle", None)
    with frozen_v0(tmp_path) as (url, _):
        async with AdkTables(url) as source:
            with pytest.raises(ConfigurationError, match=r"install google-adk 2\.8\.0 or later"):
                await listed(source)


# --- recognition ---------------------------------------------------------------------------------


async def test_kind_is_detected_and_described(adk: Adk) -> None:
    expected = {"v1": TableKind.ADK_V1, "v0": TableKind.ADK_V0, "sq": TableKind.ADK_SQLITE}[
        adk.kind[:2]
    ]
    await fill(adk.service, [said()])
    assert await detect(adk.url) == {expected}
    engine = create_async_engine(adk.url)
    assert await detect(db_engine=engine) == {expected}
    async with AdkTables(db_engine=engine) as source:
        assert await assert_same_as_adk(adk.service, source) == 1
        assert source.description == expected.value
    await engine.dispose()


@json_kinds
async def test_plaintext_in_a_database_of_1_x_does_not_make_it_one_of_google_adk(
    adk: Adk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the advice would be to omit the keys, and forged plaintext would be copied."""
    monkeypatch.setenv("KEY_OF_1X", "passphrase")
    insert_sessions(adk, 150)
    first_and_last = "user_id IN ('u0', 'u6')"
    adk.run(f"UPDATE sessions SET state = 'AQFnQUFBQUFC' WHERE NOT {first_and_last}")
    assert await detect(adk.url) == {TableKind.PACKAGE_1X}
    async with await open_source(adk.url, ["env:KEY_OF_1X"]) as source:
        assert isinstance(source, Package1xTables)
    both = r"in part, by adk-secure-sessions 1\.x: give the key .* if google-adk has written"
    with pytest.raises(ConfigurationError, match=both):
        await open_source(adk.url)
    async with adk.source() as tables:
        with pytest.raises(ConfigurationError, match=r"adk-secure-sessions 1\.x"):
            await listed(tables)


@json_kinds
async def test_one_encrypted_state_forbids_the_advice_to_omit_the_keys(
    adk: Adk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_1X", "passphrase")
    insert_sessions(adk, 150)
    with pytest.raises(ConfigurationError, match="is not encrypted: omit the keys"):
        await open_source(adk.url, ["env:KEY_OF_1X"])
    adk.run("UPDATE sessions SET state = 'AQFnQUFBQUFC' WHERE id = 's73'")
    async with await open_source(adk.url, ["env:KEY_OF_1X"]) as source:
        assert isinstance(source, Package1xTables)
    async with await open_source(adk.url) as source:  # it is not among the samples
        found = {one.session_id: content for one, content in (await contents(source)).items()}
    assert isinstance(found.pop("s73"), Unreadable)
    assert all(isinstance(content, SessionContent) for content in found.values())


async def test_database_without_sessions_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    path.touch()
    url = f"sqlite:///{path}"
    assert await detect(url) == frozenset()
    async with AdkTables(url) as source:
        with pytest.raises(ConfigurationError, match="check the URL"):
            await source.count(Selection())
    with pytest.raises(ConfigurationError, match="contains neither"):
        await open_source(url)
    with pytest.raises(ConfigurationError, match=r"missing\.db', does not exist: check"):
        AdkTables(f"sqlite:///{tmp_path}/missing.db")
    with pytest.raises(ConfigurationError, match="exactly one"):
        AdkTables()
    with pytest.raises(ConfigurationError, match="not a database URL"):
        await detect("secret")
    assert [file.name for file in tmp_path.iterdir()] == ["empty.db"]


@pytest.mark.parametrize("kind", ["v1-sqlite"])
@pytest.mark.parametrize("version", ["'2'", "X'ff'"])
async def test_later_schema_is_rejected(adk: Adk, version: str) -> None:
    adk.run(f"UPDATE adk_internal_metadata SET value = {version}")
    with pytest.raises(ConfigurationError, match="schema version"):
        await detect(adk.url)


# --- while google-adk writes ---------------------------------------------------------------------


@json_kinds
@pytest.mark.parametrize("mode", ["wal", "delete"])
async def test_source_is_read_only_and_changes_nothing(adk: Adk, mode: str) -> None:
    await fill(adk.service, [said()])
    path = Path(str(adk.url.database))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode = {mode}")
    before = path.read_bytes()
    async with adk.source() as source:
        await assert_same_as_adk(adk.service, source)
        writing = source.run_in_snapshot(lambda c: c.exec_driver_sql("DELETE FROM events"))
        with pytest.raises(DatabaseError):
            await writing
    if mode == "delete":
        assert path.read_bytes() == before


@pytest.mark.parametrize(
    "kind",
    [
        "v1-sqlite",
        "sqlite-service",
        "v1-postgresql",
        pytest.param("v1-mysql", marks=pytest.mark.soak),
    ],
)
async def test_each_read_is_consistent_while_google_adk_writes(adk: Adk) -> None:
    sessions = [await fill(adk.service, session_id=f"s{n}") for n in range(3)]
    done = False

    async def write() -> None:
        nonlocal done
        try:
            for number in range(12):
                for session in sessions:
                    await adk.service.append_event(session, setting(START + number, n=number + 1))
        finally:
            done = True

    async def read() -> int:
        reads = 0
        async with adk.source() as source:
            while not done:
                for content in (await contents(source)).values():
                    assert isinstance(content, SessionContent)
                    assert load_state(content.state).get("n", 0) == len(content.events)
                reads += 1
                await asyncio.sleep(0.001)
            assert await assert_same_as_adk(adk.service, source) == 36
        return reads

    _, reads = await asyncio.gather(write(), read())
    assert reads > 2


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["v1-mysql", "v1-mariadb"])
async def test_names_that_differ_in_case_share_a_state_as_in_google_adk(adk: Adk) -> None:
    await fill(adk.service, user_id="Lin", session_id="a", state={"user:k": 1, "app:a": 1})
    await fill(adk.service, user_id="lin", session_id="b", state={"user:k": 2})
    await fill(adk.service, app_name="APP", user_id="LIN", session_id="c", state={"app:a": 2})
    async with adk.source() as source:
        assert len(await listed(source)) == 3
        await assert_same_as_adk(adk.service, source)


@pytest.mark.parametrize("kind", ["v1-mysql"])
async def test_ids_in_tables_with_another_character_set_are_read(adk: Adk) -> None:
    """The default of MariaDB before 11.6 is latin1; the texts of a query are utf8mb4."""
    adk.run("ALTER TABLE events DROP FOREIGN KEY events_ibfk_1")
    for table in ADK_TABLES:
        adk.run(f"ALTER TABLE {table.name} CONVERT TO CHARACTER SET latin1")
    for number, user_id in enumerate(["ada", "jörg", "zoë"]):
        await fill(adk.service, [said(f"{number}")], user_id=user_id)
    async with adk.source() as source:
        assert await assert_same_as_adk(adk.service, source) == 3
