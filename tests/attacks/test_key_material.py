"""Keys are in no repr, no attribute, no error, no pickle and no copy."""

import base64
import copy
import pickle
import secrets
from collections.abc import Callable
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
    PassphraseKey,
    StaticKey,
    key_provider,
)
from tests.attacks.needles import all_of

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
def holders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """All public objects that hold key material."""
    monkeypatch.setenv("THE_KEY", TEXT)
    aes, fernet = AesGcmBackend(KEY), FernetBackend(TEXT)
    return {
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
    }


HOLDERS = [
    "AES backend",
    "Fernet backend",
    "AES backend by key spec",
    "AES backend by passphrase",
    "static key",
    "environment key",
    "file key",
    "passphrase",
    "key spec",
    "AES cipher",
    "Fernet cipher",
    "service",
]


@pytest.mark.parametrize("name", HOLDERS)
def test_key_is_in_no_repr(holders: dict[str, Any], name: str) -> None:
    holder = holders[name]
    shown = repr(holder) + str(holder) + format(holder) + f"{holder!a}" + repr([holder])
    assert [form for form in FORMS if form in shown] == []


# A cipher holds the key that it was made with, which is not the user's root key.
@pytest.mark.parametrize(
    "name", [name for name in HOLDERS if "passphrase" not in name and "cipher" not in name]
)
def test_root_key_is_in_no_attribute(holders: dict[str, Any], name: str) -> None:
    """Not in `vars()`, which crash reporters print, nor in the objects that it refers to."""
    shown = "\n".join(shown_by(holders[name], set()))
    assert [form for form in FORMS if form in shown] == []


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


COPIES: dict[str, Callable[[Any], object]] = {
    "pickle": pickle.dumps,
    "oldest pickle": lambda holder: pickle.dumps(holder, protocol=0),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


# A shallow copy of a service or a cipher is a second name for the same objects in this process.
COPIED = [
    (name, how)
    for name in HOLDERS
    for how in COPIES
    if how != "copy" or not (name == "service" or "cipher" in name)
]


@pytest.mark.parametrize(("name", "how"), COPIED)
def test_holder_of_a_key_cannot_be_pickled_or_copied(
    holders: dict[str, Any], name: str, how: str
) -> None:
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)) as rejection:
        COPIES[how](holders[name])
    shown = all_of(rejection.value)
    assert [form for form in FORMS if form in shown] == []


async def test_open_service_shows_and_pickles_no_key(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        await service.create_session(app_name="app", user_id="user", state={"a": 1})
        shown = "\n".join(shown_by(service, set()))
        assert [form for form in FORMS if form in shown] == []
        for how in (pickle.dumps, copy.deepcopy):
            with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
                how(service)


MISTAKES: dict[str, Callable[[], object]] = {
    "short": lambda: AesGcmBackend(KEY[:31]),
    "long": lambda: AesGcmBackend(KEY + b"x"),
    "short text": lambda: FernetBackend(TEXT[:-5]),
    "not base64": lambda: FernetBackend(TEXT[:-2] + "!!"),
    "as a spec": lambda: AesGcmBackend("key:" + TEXT),
    "in place of a variable": lambda: AesGcmBackend(f"{TEXT}:env"),
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
    # `all_of` quotes this file, too, in which no form of the key is written out.
    shown = all_of(rejection.value)
    assert [part for part in parts if part in shown] == []
