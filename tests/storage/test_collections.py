"""Collections: items of a user that are stored like events, on every kind of database."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.formats.events import encode_item
from adk_secure_sessions.maintenance import Database, verify
from adk_secure_sessions.storage.features.collections import MAX_NAME_BYTES, Collection
from adk_secure_sessions.storage.schema import SessionRevision
from adk_secure_sessions.storage.writes import StaleRevision
from tests.faults import Point, with_faults
from tests.maintenance.support import APP, OLD, event

BACKEND = AesGcmBackend(OLD)
ITEMS = [encode_item({"n": n}) for n in range(5)]


@pytest.fixture
async def service(url: str) -> AsyncIterator[EncryptedSessionService]:
    async with EncryptedSessionService(url, BACKEND) as service:
        yield service


async def fill(
    service: EncryptedSessionService, name: str = "c", user: str = "ada"
) -> SessionRevision:
    return [await service.collections.append((APP, user, name), item) for item in ITEMS][-1]


async def test_items_are_read_back_in_order(service: EncryptedSessionService, url: str) -> None:
    at = await fill(service)
    for reader in (service, EncryptedSessionService(url, BACKEND)):
        found = await reader.collections.get((APP, "ada", "c"))
        assert found is not None
        assert found.items == tuple(ITEMS)
        assert (found.version, found.size) == (at, 5)
        last = await reader.collections.get((APP, "ada", "c"), limit=2)
        assert last is not None
        assert last.items == tuple(ITEMS[3:])
        assert await reader.collections.get((APP, "bob", "c")) is None
        assert await reader.collections.get((APP, "ada", "other")) is None
    await reader.close()


async def test_collections_and_sessions_of_one_name_are_kept_apart(
    service: EncryptedSessionService,
) -> None:
    await fill(service, "same")
    assert await service.get_session(app_name=APP, user_id="ada", session_id="same") is None
    session = await service.create_session(app_name=APP, user_id="ada", session_id="same")
    await service.append_event(session, event(1))
    for user_id in ("ada", None):
        listing = await service.list_sessions(app_name=APP, user_id=user_id)
        assert [one.id for one in listing.sessions] == ["same"]
    assert [one.name for one in await service.collections.of_user(APP, "ada")] == ["same"]
    await service.delete_session(app_name=APP, user_id="ada", session_id="same")
    found = await service.collections.get((APP, "ada", "same"))
    assert found is not None
    assert found.size == 5
    assert await service.collections.delete((APP, "ada", "same"))
    assert not await service.collections.delete((APP, "ada", "same"))
    assert await service.collections.of_user(APP, "ada") == []


async def test_concurrent_appends_lose_no_item(service: EncryptedSessionService, url: str) -> None:
    attempts = []

    def item(number: int, _: object) -> bytes:
        attempts.append(number)
        return encode_item({"n": number})

    async with EncryptedSessionService(url, BACKEND) as other:
        both = (service.collections, other.collections)
        appends = (both[n % 2].append((APP, "ada", "c"), partial(item, n)) for n in range(20))
        await asyncio.gather(*appends)
        found = await other.collections.get((APP, "ada", "c"))
    assert found is not None
    assert sorted(found.items) == sorted(encode_item({"n": n}) for n in range(20))
    assert len(attempts) <= 2 * 20, "only the other service makes one fail"


async def test_append_at_an_old_position_is_rejected(service: EncryptedSessionService) -> None:
    at = await fill(service)
    await service.collections.append_at(at, (APP, "ada", "c"), ITEMS[0])
    with pytest.raises(StaleRevision):
        await service.collections.append_at(at, (APP, "ada", "c"), ITEMS[1])


async def test_replacement_in_a_collection_that_another_process_rewrote_is_rejected(
    service: EncryptedSessionService, url: str
) -> None:
    at = await fill(service)
    async with EncryptedSessionService(url, BACKEND) as other:
        await other.collections.rewrite((APP, "ada", "c"), ITEMS[:1], at)
    with pytest.raises(StaleRevision):
        await service.collections.append_at(at, (APP, "ada", "c"), ITEMS[0], {0: ITEMS[1]})


async def test_replaced_items_are_not_stored_any_more(
    service: EncryptedSessionService, url: str
) -> None:
    at = await fill(service)
    gone = encode_item({})
    await service.collections.append_at(at, (APP, "ada", "c"), ITEMS[4], {1: gone, 3: gone})
    async with EncryptedSessionService(url, BACKEND) as reader:
        found = await reader.collections.get((APP, "ada", "c"))
    assert found is not None
    assert found.items == (ITEMS[0], gone, ITEMS[2], gone, ITEMS[4], ITEMS[4])
    async with Database(url, BACKEND) as db:
        assert (await verify(db)).bad == 0


async def test_many_items_are_replaced_with_a_few_queries(file_url: str) -> None:
    service, faults = with_faults(lambda: EncryptedSessionService(file_url, BACKEND))
    async with service:
        append = service.collections.append
        *_, at = [await append((APP, "ada", "c"), encode_item({"n": n})) for n in range(250)]
        reads = faults.data.counts[Point.READ]
        replaced = {n: encode_item({"new": n}) for n in range(250)}
        await service.collections.append_at(at, (APP, "ada", "c"), ITEMS[0], replaced)
        assert faults.data.counts[Point.READ] - reads == 2  # 200 and 50 items
        found = await service.collections.get((APP, "ada", "c"))
        assert found is not None
        assert found.items == (*replaced.values(), ITEMS[0])


async def test_only_earlier_items_are_replaced(service: EncryptedSessionService) -> None:
    at = await fill(service)
    for number in (5, -1):
        with pytest.raises(ValueError, match="replaced"):
            await service.collections.append_at(at, (APP, "ada", "c"), ITEMS[0], {number: ITEMS[0]})
    found = await service.collections.get((APP, "ada", "c"))
    assert found is not None
    assert found.items == tuple(ITEMS)


@pytest.mark.parametrize("character", ["x", "é", "\ud800"])
async def test_name_that_is_too_long_is_rejected(file_url: str, character: str) -> None:
    longest = character * (MAX_NAME_BYTES // len(character.encode("utf-8", "surrogatepass")))
    async with EncryptedSessionService(file_url, BACKEND) as service:
        await service.collections.append((APP, "ada", longest), ITEMS[0])
        assert [one.name for one in await service.collections.of_user(APP, "ada")] == [longest]
        with pytest.raises(ValueError, match="at most"):
            await service.collections.append((APP, "ada", longest + character), ITEMS[0])


def stop(_: Collection) -> bytes:
    raise EOFError


async def test_collection_without_items_is_not_there(file_url: str) -> None:
    """The process that was creating it has stopped before it stored the first item."""
    async with EncryptedSessionService(file_url, BACKEND) as service:
        with pytest.raises(EOFError):
            await service.collections.append((APP, "ada", "c"), stop)
        assert await service.collections.of_user(APP, "ada") == []
        assert await service.collections.get((APP, "ada", "c")) is None
        await fill(service)
        assert [one.size for one in await service.collections.of_user(APP, "ada")] == [5]
