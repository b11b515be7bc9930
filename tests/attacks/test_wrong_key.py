"""A wrong root key is rejected at the start, before anything is written."""

import base64
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    EncryptionBackend,
    FernetBackend,
    FileKey,
    PassphraseKey,
    StaticKey,
    WrongKeyError,
)
from adk_secure_sessions.maintenance import Database as Maintained
from adk_secure_sessions.maintenance import rotate_root
from tests.attacks.databases import also_on
from tests.attacks.support import (
    Database,
    Operation,
    append,
    create_again,
    create_another,
    delete,
    dump,
    get,
    get_no_events,
    list_app,
    list_user,
    rejection,
    user_state,
)
from tests.attacks.world import VISIT
from tests.sqlite_files import execute, value

OTHER = bytes(reversed(range(32)))
OPERATIONS = [
    get,
    get_no_events,
    list_user,
    list_app,
    user_state,
    append,
    create_again,
    create_another,
    delete,
]
BACKENDS: list[Callable[[bytes], EncryptionBackend]] = [AesGcmBackend, FernetBackend]


def leave_wal(path: Path) -> None:
    assert value(path, "PRAGMA journal_mode = DELETE") == "delete"


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.parent.iterdir()}


@pytest.mark.parametrize("in_wal", [True, False], ids=["in WAL mode", "not in WAL mode"])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_wrong_key_is_rejected_by_prepare_tables_before_anything_is_written(
    file_db: Database, backend: Callable[[bytes], EncryptionBackend], in_wal: bool
) -> None:
    if not in_wal:
        leave_wal(file_db.path)
    before = files(file_db.path)
    async with file_db.service(backend(OTHER)) as service:
        with pytest.raises(WrongKeyError, match="root key"):
            await service.prepare_tables()
    assert files(file_db.path) == before


@also_on("engine", "postgresql")
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
async def test_wrong_key_is_rejected_by_the_first_operation_before_anything_is_written(
    typed_db: Database, operation: Operation
) -> None:
    db = typed_db
    leave_wal(db.path)  # a connection of a caller's engine would leave its files behind
    before = files(db.path), db.dump()
    async with db.service(AesGcmBackend(OTHER)) as service:
        for _ in range(2):  # the next call is rejected, too: the service is not half open
            assert type(await rejection(operation, service, db, VISIT)) is WrongKeyError
        with pytest.raises(WrongKeyError, match="root key"):
            await service.prepare_tables()
    assert (files(db.path), db.dump()) == before


async def test_right_key_listed_after_another_one_still_reads(db: Database) -> None:
    """As while a root key is rotated; each is looked up by its id."""
    async with db.service(AesGcmBackend(OTHER), additional_backends=[db.backend()]) as service:
        assert await get(service, db, VISIT) == db.session(VISIT)


WORDS = "correct horse battery staple"


def environment_key(name: str) -> EncryptionBackend:
    key = base64.b64encode(secrets.token_bytes(32)).decode()
    with mock.patch.dict(os.environ, {name: key}):
        return AesGcmBackend(f"env:{name}")


def file_key() -> EncryptionBackend:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "key"
        path.write_bytes(secrets.token_bytes(32))
        path.chmod(0o600)
        return FernetBackend(FileKey(path))


# The right backend and the wrong one.
PAIRS: dict[str, Callable[[], tuple[EncryptionBackend, EncryptionBackend]]] = {
    "passphrases": lambda: (
        AesGcmBackend(PassphraseKey(WORDS)),
        AesGcmBackend(PassphraseKey(f"{WORDS}r")),
    ),
    "passphrase and key": lambda: (AesGcmBackend(PassphraseKey(WORDS)), AesGcmBackend(OTHER)),
    "variables": lambda: (environment_key("RIGHT_KEY"), environment_key("WRONG_KEY")),
    "files": lambda: (file_key(), file_key()),
    # A provider chooses its `key_id` itself.
    "one name": lambda: (
        AesGcmBackend(PassphraseKey(WORDS, key_id="clinic")),
        AesGcmBackend(ThirdParty("clinic")),
    ),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
async def test_wrong_key_of_any_kind_is_rejected(
    tmp_path: Path, pair: Callable[[], tuple[EncryptionBackend, EncryptionBackend]]
) -> None:
    (right, wrong), path = pair(), tmp_path / "sessions.db"
    url = f"sqlite+aiosqlite:///{path}"
    async with EncryptedSessionService(url, right) as service:
        await service.create_session(**VISIT._asdict())
    before = path.read_bytes(), dump(path)
    async with EncryptedSessionService(url, wrong) as service:
        with pytest.raises(WrongKeyError):
            await service.prepare_tables()
        with pytest.raises(WrongKeyError):
            await service.get_session(**VISIT._asdict())
    assert (path.read_bytes(), dump(path)) == before
    async with EncryptedSessionService(url, right) as service:
        assert await service.get_session(**VISIT._asdict())


class ThirdParty:
    """A provider with a root key of its own, under any name."""

    def __init__(self, key_id: str) -> None:
        self._key = StaticKey(OTHER)
        self.key_id = key_id
        self.wrap, self.unwrap = self._key.wrap, self._key.unwrap


PASSPHRASE_HEADER = {
    "another salt": (1, b"\0" * 16),
    "more iterations": (17, (4).to_bytes(4, "big")),
    "no iterations": (17, (0).to_bytes(4, "big")),
    "one more lane": (21, (5).to_bytes(4, "big")),
    "more memory": (25, (65 * 1024).to_bytes(4, "big")),
    "iterations for a day": (17, (2**32 - 1).to_bytes(4, "big")),
    "no lanes": (21, (0).to_bytes(4, "big")),
    "too many lanes": (21, (2**24).to_bytes(4, "big")),
    "no memory": (25, (0).to_bytes(4, "big")),
    "all memory there is": (25, (2**32 - 1).to_bytes(4, "big")),
    "another kind": (0, b"\x01"),
    "an unknown kind": (0, b"\xff"),
}


async def test_modified_passphrase_cost_is_rejected_without_paying_it(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    url = f"sqlite+aiosqlite:///{path}"
    backend = AesGcmBackend(PassphraseKey("correct horse battery staple"))
    async with EncryptedSessionService(url, backend) as service:
        await service.prepare_tables()
    stored = value(path, "SELECT wrapped FROM secure_keyring WHERE purpose = 'index'")
    for offset, part in PASSPHRASE_HEADER.values():
        changed = stored[:offset] + part + stored[offset + len(part) :]
        execute(path, "UPDATE secure_keyring SET wrapped = ? WHERE purpose = 'index'", [changed])
        async with EncryptedSessionService(url, backend) as service:
            with pytest.raises(WrongKeyError):
                await service.prepare_tables()


@also_on("fernet")
async def test_old_root_key_opens_nothing_after_its_rotation(db: Database) -> None:
    new = AesGcmBackend(OTHER)
    async with Maintained(db.url, new, [db.backend()]) as maintained:
        await rotate_root(maintained)
    old = db.backend()
    async with db.service(old) as service:
        error = await rejection(get, service, db, VISIT)
        assert type(error) is WrongKeyError
        assert new.root_key.key_id in str(error)
    # Nor if the rows are modified to name the old root key again.
    db.run("UPDATE secure_keyring SET root_key_id = :old", old=old.root_key.key_id)
    async with db.service(old) as service:
        assert type(await rejection(get, service, db, VISIT)) is WrongKeyError
