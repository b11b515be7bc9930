"""Records replaced by others: plaintext, of no-op or unlisted backends, under unknown keys."""

import json
import secrets

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    FernetBackend,
    PlaintextRefusedError,
    SecureSessionError,
    TamperedError,
    UnknownKeyError,
)
from tests.attacks.cells import EVENT, RECORDS, SESSION_STATE, USER_KEY, Cell, by_name
from tests.attacks.databases import also_on
from tests.attacks.support import (
    SESSION,
    USER,
    Database,
    append,
    assert_rejected,
    get,
    list_user,
    only,
    outcome,
    rejection,
)
from tests.attacks.world import BOB, KEY, START, VISIT, new_event
from tests.maintenance.support import plaintext_backend

HEADER = 13
KEY_ID = slice(5, HEADER)
EVENT_JSON = json.dumps({"author": "agent", "timestamp": START, "actions": {}}).encode()
STATE_JSON = b'{"role": "administrator"}'


def forged_plaintext(cell: Cell) -> bytes:
    """The plaintext that an attacker forges for *cell*."""
    forged = {
        "event": b"\x062.13.0" + EVENT_JSON,
        "user state": len(VISIT.user_id).to_bytes(4, "big") + VISIT.user_id.encode() + STATE_JSON,
        "session state": len(VISIT.session_id).to_bytes(4, "big")
        + VISIT.session_id.encode()
        + STATE_JSON,
        "app state": STATE_JSON,
        "base": STATE_JSON,
    }
    return forged.get(cell.name, b"")


@pytest.mark.in_turn("cell", "as_text")
@also_on("fernet", "mariadb", cases=["BLOB-event"])
@pytest.mark.parametrize("cell", RECORDS, ids=by_name)
@pytest.mark.parametrize("as_text", [False, True], ids=["BLOB", "TEXT"])
async def test_record_replaced_by_plaintext_json_is_rejected(
    db: Database, cell: Cell, as_text: bool
) -> None:
    plaintext = EVENT_JSON if cell == EVENT else STATE_JSON
    cell.store(db, plaintext.decode() if as_text else plaintext)
    await assert_rejected(db, cell.impact, PlaintextRefusedError, who=cell.who)


@pytest.mark.in_turn("cell", "same_key")
@also_on("fernet", "mariadb", cases=["our key id-event"])
@pytest.mark.parametrize("cell", RECORDS, ids=by_name)
@pytest.mark.parametrize("same_key", [True, False], ids=["our key id", "its own key id"])
async def test_record_replaced_by_a_no_op_one_is_rejected(
    db: Database, cell: Cell, same_key: bool
) -> None:
    key_id = cell.stored(db)[KEY_ID] if same_key else secrets.randbits(63).to_bytes(8, "big")
    cell.store(db, b"AKS\x02\x03" + key_id + forged_plaintext(cell))
    await assert_rejected(db, cell.impact, PlaintextRefusedError, who=cell.who)


async def test_no_op_record_with_a_no_op_key_beside_it_is_rejected(db: Database) -> None:
    """An attacker can also insert a row that claims to be its key."""
    key_id = secrets.randbits(63)
    db.run(
        "INSERT INTO secure_data_keys SELECT :key, owner, 5, 3, created_at, x'' "
        f"FROM secure_data_keys WHERE {USER_KEY.where}",
        key=key_id,
    )
    record = b"AKS\x02\x03" + key_id.to_bytes(8, "big") + forged_plaintext(SESSION_STATE)
    SESSION_STATE.store(db, record)
    await assert_rejected(db, SESSION, PlaintextRefusedError)


@also_on("fernet", cases=["event"])
@pytest.mark.parametrize("cell", RECORDS, ids=by_name)
async def test_record_that_names_an_unlisted_backend_or_an_unknown_key_is_rejected(
    db: Database, cell: Cell
) -> None:
    stored = cell.stored(db)
    backend_ids = (1 if db.is_fernet else 2, 0, 4, 0x7F, 0x80, 0xFF)
    key_ids = (secrets.randbits(63), 0, 2**63 - 1, 2**64 - 1)
    for header in (
        *(bytes([backend_id]) + stored[KEY_ID] for backend_id in backend_ids),
        *(stored[4:5] + key_id.to_bytes(8, "big") for key_id in key_ids),
    ):
        cell.store(db, stored[:4] + header + stored[HEADER:])
        async with db.service() as service:
            assert type(await rejection(get, service, db, cell.who)) is UnknownKeyError
    await assert_rejected(db, cell.impact, UnknownKeyError, who=cell.who)


@also_on("fernet", "packed", cases=["event"])
@pytest.mark.parametrize("cell", RECORDS, ids=by_name)
async def test_record_that_names_a_listed_backend_that_did_not_write_it_is_rejected(
    db: Database, cell: Cell
) -> None:
    """Listing NoOpBackend allows its own records; those of other backends stay protected."""
    stored, no_op = cell.stored(db), plaintext_backend()
    other = AesGcmBackend(KEY) if db.is_fernet else FernetBackend(KEY)
    for changed, backend in (
        (stored[:4] + bytes([other.backend_id]) + stored[5:], other),
        (b"AKS\x02\x03" + stored[KEY_ID] + forged_plaintext(cell), no_op),
    ):
        cell.store(db, changed)
        async with db.service(additional_backends=[backend]) as service:
            assert type(await rejection(get, service, db, cell.who)) is TamperedError


@also_on("fernet", cases=["event"])
@pytest.mark.parametrize("cell", RECORDS, ids=by_name)
async def test_record_of_a_later_format_is_rejected(db: Database, cell: Cell) -> None:
    stored = cell.stored(db)
    cell.store(db, stored[:3] + b"\x03" + stored[4:])
    await assert_rejected(db, cell.impact, TamperedError, who=cell.who)


@also_on("fernet")
async def test_record_of_a_backend_that_is_no_longer_listed_is_rejected(db: Database) -> None:
    ours = db.backend()
    other = AesGcmBackend(KEY) if db.is_fernet else FernetBackend(KEY)
    async with EncryptedSessionService(db.url, other, [ours]) as service:
        session = db.session(VISIT)
        await service.append_event(session, new_event(20, {"step": 20}))
        assert await get(service, db, VISIT) == session
    await assert_rejected(db, USER, UnknownKeyError)  # her row names the other backend's key
    async with db.service() as service:
        error = await rejection(get, service, db, VISIT)
    assert "list it in additional_backends" in str(error)


async def test_record_of_no_op_is_rejected_where_it_is_not_listed(db: Database) -> None:
    async with EncryptedSessionService(db.url, plaintext_backend(), [db.backend()]) as service:
        session = db.session(VISIT)
        await service.append_event(session, new_event(20, {"step": 20}))
    await assert_rejected(db, only(get, append, list_user), PlaintextRefusedError)


async def test_database_that_no_op_made_is_rejected_by_an_encrypting_backend(db: Database) -> None:
    db.define(*(f"DROP TABLE {table}" for table in db.dump()))
    async with EncryptedSessionService(db.url, plaintext_backend()) as service:
        await service.create_session(**VISIT._asdict())
    before = db.dump()
    async with db.service() as service:
        with pytest.raises(PlaintextRefusedError, match="NoOpBackend"):
            await service.prepare_tables()
        with pytest.raises(PlaintextRefusedError, match="NoOpBackend"):
            await service.create_session(**VISIT._replace(session_id="another")._asdict())
    assert db.dump() == before


async def test_database_that_we_made_is_rejected_by_no_op_alone(db: Database) -> None:
    before = db.dump()
    async with db.service(plaintext_backend()) as service:
        with pytest.raises(Exception, match="wrapped by root key"):
            await service.prepare_tables()
        with pytest.raises(Exception, match="wrapped by root key"):
            await get(service, db, VISIT)
    assert db.dump() == before


@pytest.mark.in_turn("generation", "backend_id")
@also_on("mariadb", cases=["200--1"])  # servers store only integers there
@pytest.mark.parametrize("generation", ["text", b"\xff", 0.5, -1, 2**63 - 1, None])
@pytest.mark.parametrize("backend_id", [200, 3, "text"])
async def test_data_key_row_that_nothing_authenticates_is_not_relied_on(
    aes_db: Database, generation: object, backend_id: object
) -> None:
    """It names a backend that is not listed, so it is not unwrapped and its numbers are free."""
    aes_db.lift_constraints("secure_data_keys")
    aes_db.run(
        "INSERT INTO secure_data_keys SELECT :key, owner, :generation, :backend, created_at, x'00' "
        f"FROM secure_data_keys WHERE {USER_KEY.where}",
        key=secrets.randbits(63),
        generation=generation,
        backend=backend_id,
    )
    # The first needs no new key; the second makes the owner's next generation.
    for backend, more in ((aes_db.backend(), []), (FernetBackend(KEY), [aes_db.backend()])):
        with aes_db.undone_afterwards():
            async with aes_db.service(backend, additional_backends=more) as service:
                for operation in (get, list_user, append):
                    result = await outcome(operation(service, aes_db, VISIT))
                    accepted = not isinstance(result, Exception)
                    assert accepted or isinstance(result, SecureSessionError), repr(result)
                assert await outcome(get(service, aes_db, BOB)) == aes_db.session(BOB)
