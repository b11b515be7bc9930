"""Keys are in no repr, no attribute, no error, no pickle and no copy."""

import asyncio
import base64
import json
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedSessionService,
    EnvironmentKey,
    FernetBackend,
    FileKey,
    KeyServiceError,
    PassphraseKey,
    SecureSessionError,
    StaticKey,
    TamperedError,
    key_provider,
)
from adk_secure_sessions.maintenance import Database, rotate_master, rotate_root, status, verify
from tests.attacks.needles import forms_of, locals_of

KEY = secrets.token_bytes(32)
TEXT = base64.urlsafe_b64encode(KEY).decode()
PASSPHRASE = "open sesame " + secrets.token_hex(8)
FORMS = [
    repr(KEY)[2:-1],
    repr(list(KEY))[1:-1],
    KEY.hex(),
    KEY.hex().upper(),
    TEXT.rstrip("="),
    base64.b64encode(KEY).decode().rstrip("="),
    PASSPHRASE,
]


def file_key(path: Path) -> FileKey:
    path.write_text(TEXT)
    path.chmod(0o600)
    return FileKey(path)


@pytest.fixture
async def holders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dict[str, Any]]:
    """All public objects that hold key material."""
    monkeypatch.setenv("THE_KEY", TEXT)
    aes, fernet = AesGcmBackend(KEY), FernetBackend(TEXT)
    service = EncryptedSessionService(":memory:", aes, [fernet])
    await service.create_session(app_name="app", user_id="user", state={"a": 1})
    yield {
        "AES backend": aes,
        "Fernet backend": fernet,
        "AES backend by key spec": AesGcmBackend("env:THE_KEY"),
        "AES backend by passphrase": AesGcmBackend(PassphraseKey(PASSPHRASE)),
        "static key": StaticKey(KEY),
        "environment key": EnvironmentKey("THE_KEY"),
        "file key": file_key(tmp_path / "key"),
        "passphrase": PassphraseKey(PASSPHRASE),
        "key spec": key_provider("env:THE_KEY"),
        "AES cipher": aes.cipher(KEY),
        "Fernet cipher": fernet.cipher(KEY),
        "service": EncryptedSessionService(":memory:", aes, [fernet]),
        "open service": service,
        "database of commands": Database(":memory:", aes, [fernet]),
    }
    await service.close()


def test_root_key_is_in_no_attribute(holders: dict[str, Any]) -> None:
    """Not in `vars()`, which crash reporters print, nor in the objects that it refers to."""
    for name, holder in holders.items():
        # A cipher holds the key that it was made with, which is not the user's root key.
        if "passphrase" not in name and "cipher" not in name:
            shown = "\n".join(shown_by(holder, set()))
            assert [form for form in FORMS if form in shown] == [], name


def shown_by(thing: object, seen: set[int]) -> list[str]:
    """The repr of *thing* and of everything inside it: objects of ours and containers."""
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    texts = [repr(thing)]
    inside: list[object] = []
    if type(thing).__module__.startswith("adk_secure_sessions"):
        inside += getattr(thing, "__dict__", {}).values()
        for cls in type(thing).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            inside += [getattr(thing, name, None) for name in slots if name != "__weakref__"]
    if isinstance(thing, dict):
        inside += [*thing, *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset):
        inside += list(thing)
    for one in inside:
        texts += shown_by(one, seen)
    return texts


MISTAKES: dict[str, Callable[[], object]] = {
    "short": lambda: AesGcmBackend(KEY[:31]),
    "long": lambda: AesGcmBackend(KEY + b"x"),
    "short text": lambda: FernetBackend(TEXT[:-5]),
    "not base64": lambda: FernetBackend(TEXT[:-2] + "!!"),
    "as a spec": lambda: AesGcmBackend("key:" + TEXT),
    "in place of a variable": lambda: AesGcmBackend(f"{TEXT}:env"),
    "in place of its name": lambda: AesGcmBackend(f"env:{TEXT}"),
    "passphrase in place of its name": lambda: key_provider(f"passphrase-env:{PASSPHRASE}"),
    "in place of a path": lambda: AesGcmBackend(f"file:{TEXT}"),
    "as a list": lambda: AesGcmBackend(list(KEY)),  # type: ignore[arg-type]
    "as a service": lambda: EncryptedSessionService(":memory:", TEXT),  # type: ignore[arg-type]
    "as a URL": lambda: EncryptedSessionService(TEXT, AesGcmBackend(KEY)),
    "key first": lambda: EncryptedSessionService(KEY, AesGcmBackend(KEY)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_key_that_is_rejected_is_not_repeated(mistake: str) -> None:
    parts = [form[:20] for form in FORMS]
    with pytest.raises(ConfigurationError) as rejection:
        MISTAKES[mistake]()
    # `locals_of` quotes this file, too, in which no form of the key is written out.
    shown = locals_of(rejection.value)
    assert [part for part in parts if part in shown] == []


def key_file_of(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "bad"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_key_that_cannot_be_used_is_in_no_variable_of_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real key, written in another way than we read, or readable by others."""
    monkeypatch.setenv("HEX_KEY", KEY.hex())
    mistakes: list[Callable[[], object]] = [
        lambda: FileKey(key_file_of(tmp_path, KEY.hex())),
        lambda: FileKey(key_file_of(tmp_path, TEXT, 0o644)),
        lambda: AesGcmBackend(f"file:{key_file_of(tmp_path, KEY.hex())}"),
        lambda: EnvironmentKey("HEX_KEY"),
        lambda: FernetBackend("env:HEX_KEY"),
        lambda: key_provider("env:HEX_KEY"),
        lambda: PassphraseKey(PASSPHRASE, key_id="none"),
        lambda: AesGcmBackend(KEY).cipher(KEY + b"x"),
        lambda: FernetBackend(KEY).cipher(KEY + b"x"),
    ]
    for mistake in mistakes:
        with pytest.raises(ValueError) as rejection:  # noqa: PT011 - of several classes
            mistake()
        shown = locals_of(rejection.value)
        assert [form for form in (*FORMS, *forms_of(KEY)) if form in shown] == []


# --- a start, a command or a keyring read that fails ---------------------------------------------

SEEN: list[bytes] = []  # all master keys that the providers below were given, or gave


class Breaking:
    """A third party's provider whose call number *at* fails, in one of many ways."""

    key_id = "third party"

    def __init__(self, how: str, at: int) -> None:
        self._key = StaticKey(KEY)
        self._how = how
        self._calls_left = at
        self.has_failed = False

    async def wrap(self, key: bytes, associated_data: bytes) -> Any:
        SEEN.append(key)
        return await self._answer(await self._key.wrap(key, associated_data), key)

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> Any:
        key = await self._key.unwrap(wrapped, associated_data)
        SEEN.append(key)
        return await self._answer(key, key)

    async def _answer(self, answer: bytes, key: bytes) -> Any:
        self._calls_left -= 1
        self.has_failed = self.has_failed or not self._calls_left
        if self._calls_left:
            return answer
        match self._how:
            case "another type":
                return bytearray(key)
            case "another length":
                return answer + b"x"
            case "another key":
                return answer[::-1]
            case "never":
                await asyncio.sleep(60)
            case "its own error":
                raise ValueError(key)
            case "a key service's error":
                try:
                    raise ValueError(key)
                except ValueError as error:
                    raise KeyServiceError("busy") from error
            case "rejected":
                try:
                    raise ValueError(key)
                except ValueError:
                    raise TamperedError  # noqa: B904 - the context is what we want to lose
        raise AssertionError(self._how)


HOW = [
    "another type",
    "another length",
    "another key",
    "never",
    "its own error",
    "a key service's error",
    "rejected",
]


async def start(url: str, root: Any) -> None:
    async with EncryptedSessionService(url, AesGcmBackend(root)) as service:
        await service.prepare_tables()


async def create(url: str, root: Any) -> None:
    await start(url, root)


async def read_the_keyring_again(url: str, root: Any) -> None:
    """A running service meets a new data master."""
    async with EncryptedSessionService(url, AesGcmBackend(root)) as service:
        await service.create_session(app_name="a", user_id="u")
        async with Database(url, AesGcmBackend(Breaking("", 0))) as db:
            await rotate_master(db)
        await service.create_session(app_name="a", user_id="u2")


async def rotate(url: str, root: Any) -> None:
    async with Database(url, AesGcmBackend(root)) as db:
        await rotate_master(db)


async def rotate_to_another_root_key(url: str, root: Any) -> None:
    async with Database(url, AesGcmBackend(OTHER_KEY), [AesGcmBackend(root)]) as db:
        await rotate_root(db)


async def rotate_from_another_root_key(url: str, root: Any) -> None:
    other = AesGcmBackend(OTHER_KEY)
    async with Database(url, other, [AesGcmBackend(Breaking("", 0))]) as db:
        await rotate_root(db)
    async with Database(url, AesGcmBackend(root), [other]) as db:
        await rotate_root(db)


async def inspect(url: str, root: Any) -> None:
    async with Database(url, AesGcmBackend(root)) as db:
        await status(db)
        await verify(db)


OTHER_KEY = secrets.token_bytes(32)
FAILING = [
    create,
    start,
    read_the_keyring_again,
    rotate,
    rotate_to_another_root_key,
    rotate_from_another_root_key,
    inspect,
]


# By default every way for a start, and two ways for the rest.
CASES = [
    pytest.param(
        work,
        how,
        marks=() if work is start or how in HOW[-3:-1] else pytest.mark.soak,
        id=f"{work.__name__}-{how}",
    )
    for work in FAILING
    for how in HOW
]


@pytest.mark.parametrize(("work", "how"), CASES)
async def test_failing_provider_leaves_no_key_in_a_variable_of_a_traceback(
    tmp_path: Path, work: Callable[[str, Any], Awaitable[None]], how: str
) -> None:
    """Each call of the provider fails once."""
    errors = 0
    before = tmp_path / "before.db"
    if work is not create:
        await start(f"sqlite+aiosqlite:///{before}", Breaking("", 0))
    for at in count(1):
        path = tmp_path / f"{at}.db"
        if before.exists():
            shutil.copy(before, path)
        root = Breaking(how, at)
        try:
            async with asyncio.timeout(0.1 if how == "never" else None):
                await work(f"sqlite+aiosqlite:///{path}", root)
        except (SecureSessionError, TimeoutError) as error:
            errors += 1
            shown = locals_of(error)
            assert [key for key in SEEN if any(form in shown for form in forms_of(key))] == []
            assert [form for form in (*FORMS, *forms_of(OTHER_KEY)) if form in shown] == []
        if not root.has_failed:
            break
    assert errors or how == "another key"  # which is an error only for `rotate_root`
    assert SEEN


def test_search_of_these_tests_finds_a_key_in_a_variable() -> None:
    """In a frame of the standard library, of an error that is the cause of another."""

    def fails() -> None:
        try:
            json.loads(KEY.hex() + "!")
        except ValueError as error:
            raise LookupError from error

    with pytest.raises(LookupError) as info:
        fails()
    shown = locals_of(info.value)
    assert [form for form in forms_of(KEY) if form in shown] == [KEY.hex()]
