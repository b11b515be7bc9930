"""A wrong root key is rejected at the start, before anything is written."""

import base64
import secrets
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedSessionService,
    EncryptionBackend,
    EnvironmentKey,
    FernetBackend,
    FileKey,
    KeyProvider,
    PassphraseKey,
    StaticKey,
    VaultKey,
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
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)


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


@pytest.mark.parametrize("in_wal", [True, False], ids=["in WAL mode", "not in WAL mode"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
async def test_wrong_key_is_rejected_by_the_first_operation_before_anything_is_written(
    file_db: Database, operation: Operation, in_wal: bool
) -> None:
    if not in_wal:
        leave_wal(file_db.path)
    before = files(file_db.path)
    async with file_db.service(AesGcmBackend(OTHER)) as service:
        assert type(await rejection(operation, service, file_db, VISIT)) is WrongKeyError
        # The next call is rejected, too: the service is not half open.
        assert type(await rejection(operation, service, file_db, VISIT)) is WrongKeyError
    assert files(file_db.path) == before


@also_on("postgresql")
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
async def test_wrong_key_is_rejected_on_a_server_before_anything_is_written(
    server_db: Database, operation: Operation
) -> None:
    before = server_db.dump()
    async with server_db.service(AesGcmBackend(OTHER)) as service:
        assert type(await rejection(operation, service, server_db, VISIT)) is WrongKeyError
        with pytest.raises(WrongKeyError, match="root key"):
            await service.prepare_tables()
    assert server_db.dump() == before


async def test_wrong_key_is_rejected_on_a_callers_engine_before_anything_is_written(
    tmp_path: Path,
) -> None:
    db = Database(tmp_path / "sessions.db", "aesgcm", on_engine=True)
    leave_wal(db.path)
    before = files(db.path)
    async with db.service(AesGcmBackend(OTHER)) as service:
        with pytest.raises(WrongKeyError):
            await service.prepare_tables()
        for operation in OPERATIONS:
            assert type(await rejection(operation, service, db, VISIT)) is WrongKeyError
    assert files(db.path) == before


async def test_right_key_works_after_a_wrong_one_was_rejected(db: Database) -> None:
    async with db.service(AesGcmBackend(OTHER)) as service:
        with pytest.raises(WrongKeyError):
            await service.prepare_tables()
    async with db.service() as service:
        assert await get(service, db, VISIT) == db.session(VISIT)


async def test_right_key_listed_after_another_one_still_reads(db: Database) -> None:
    """As while a root key is rotated; each is looked up by its id."""
    async with db.service(AesGcmBackend(OTHER), additional_backends=[db.backend()]) as service:
        assert await get(service, db, VISIT) == db.session(VISIT)


async def assert_other_is_rejected(
    path: Path, right: EncryptionBackend, wrong: EncryptionBackend
) -> None:
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


async def test_wrong_passphrase_is_rejected(tmp_path: Path) -> None:
    await assert_other_is_rejected(
        tmp_path / "sessions.db",
        AesGcmBackend(PassphraseKey("correct horse battery staple")),
        AesGcmBackend(PassphraseKey("correct horse battery stapler")),
    )


async def test_key_in_place_of_a_passphrase_is_rejected(tmp_path: Path) -> None:
    await assert_other_is_rejected(
        tmp_path / "sessions.db",
        AesGcmBackend(PassphraseKey("correct horse battery staple")),
        AesGcmBackend(OTHER),
    )


async def test_wrong_environment_key_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIGHT_KEY", base64.b64encode(secrets.token_bytes(32)).decode())
    monkeypatch.setenv("WRONG_KEY", base64.b64encode(secrets.token_bytes(32)).decode())
    await assert_other_is_rejected(
        tmp_path / "sessions.db",
        AesGcmBackend(EnvironmentKey("RIGHT_KEY")),
        AesGcmBackend("env:WRONG_KEY"),
    )


async def test_wrong_key_file_is_rejected(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    for name in ("right", "wrong"):
        (keys / name).write_bytes(secrets.token_bytes(32))
        (keys / name).chmod(0o600)
    await assert_other_is_rejected(
        tmp_path / "sessions.db",
        FernetBackend(FileKey(keys / "right")),
        FernetBackend(FileKey(keys / "wrong")),
    )


async def test_root_key_that_takes_the_name_of_another_is_rejected(tmp_path: Path) -> None:
    """A provider chooses its `key_id` itself."""
    right = AesGcmBackend(PassphraseKey("correct horse battery staple", key_id="clinic"))
    wrong = AesGcmBackend(ThirdParty("clinic"))
    await assert_other_is_rejected(tmp_path / "sessions.db", right, wrong)


class ThirdParty:
    """A provider with a root key of its own, under any name."""

    def __init__(self, key_id: str) -> None:
        self._key = StaticKey(OTHER)
        self.key_id = key_id
        self.wrap, self.unwrap = self._key.wrap, self._key.unwrap


@pytest.mark.parametrize("key_id", ["none", "key:", "key:0123456789abcdef", "", "x" * 256, "a\nb"])
def test_wrong_name_that_is_reserved_for_another_kind_of_root_key_is_rejected(key_id: str) -> None:
    """Rows under the name `none` count as plaintext, and those under `key:` as a static key's."""
    makers: list[Callable[[], KeyProvider]] = [
        lambda: ThirdParty(key_id),
        lambda: PassphraseKey("words", key_id=key_id),
        lambda: VaultKey("transit/a", address="https://vault", token="t", key_id=key_id or "none"),
    ]
    for make in makers:
        with pytest.raises(ConfigurationError, match="key_id"):
            EncryptedSessionService(":memory:", AesGcmBackend(make()))


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


async def test_modified_passphrase_cost_is_rejected_without_paying_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "sessions.db"
    url = f"sqlite+aiosqlite:///{path}"
    backend = AesGcmBackend(PassphraseKey("correct horse battery staple"))
    async with EncryptedSessionService(url, backend) as service:
        await service.prepare_tables()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        ((stored,),) = connection.execute(
            "SELECT wrapped FROM secure_keyring WHERE purpose = 'index'"
        )
        for name, (offset, value) in PASSPHRASE_HEADER.items():
            changed = stored[:offset] + value + stored[offset + len(value) :]
            update = "UPDATE secure_keyring SET wrapped = ? WHERE purpose = 'index'"
            connection.execute(update, (changed,))
            async with EncryptedSessionService(url, backend) as service:
                try:
                    await service.prepare_tables()
                except WrongKeyError:
                    continue
            pytest.fail(f"{name} was not rejected")


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
