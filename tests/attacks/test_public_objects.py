"""No public constructor, function or method shows what it was given, and no object copies a key.

How it works.  The public objects are those that docs/api documents, and those in `__all__` of the
packages.  Each function and constructor is called with secrets in each argument, in turn, of types
that fail in different ways.  The methods of public classes are not called: `hides_locals` must have
decorated them all.  For the objects that hold keys, a test uses every kind of service, records all
keys that are made, and looks into all objects of this package that are alive.
"""

import asyncio
import gc
import importlib
import inspect
import os
import re
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hmac import HMAC
from google.adk.sessions import InMemorySessionService
from google.genai import types

import adk_secure_sessions
from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedArtifactService,
    EncryptedMemoryService,
    EncryptedSessionService,
    EncryptedSessionWrapper,
    FernetBackend,
    PassphraseKey,
    maintenance,
    migration,
)
from adk_secure_sessions.crypto.package_1x import Package1xKeys
from adk_secure_sessions.hiding import HoldsSecrets, hides_locals, is_hidden
from adk_secure_sessions.maintenance import Database, rotate_master, verify
from adk_secure_sessions.results import Result
from tests.attacks.needles import COPIES, locals_of
from tests.pages import public_names

API = Path(__file__).parent.parent.parent / "docs" / "api.md"
NEEDLE = "Wq83ZkNdl"
# It is for tests of providers of the application, whose errors the application wants to see.
FOR_TESTS = "check_key_provider"


def public() -> dict[str, Any]:
    """The public functions and classes, by name, without errors and results."""
    packages = (adk_secure_sessions, maintenance, migration)
    names = {f"{one.__name__}.{name}" for one in packages for name in public_names(one)}
    names |= set(re.findall(r"^::: (\S+)", API.read_text("utf-8"), re.MULTILINE))
    found = {}
    for name in sorted(names):
        module, _, attribute = name.rpartition(".")
        one = getattr(importlib.import_module(module), attribute)
        is_result = isinstance(one, type) and issubclass(one, BaseException | tuple | str | Result)
        is_protocol = getattr(one, "_is_protocol", False)
        if (inspect.isfunction(one) or isinstance(one, type)) and not (is_result or is_protocol):
            found[one.__qualname__] = one
    del found[FOR_TESTS]
    return found


PUBLIC = public()


def undecorated(name: str, one: Any) -> Iterator[str]:
    if inspect.isfunction(one):
        if inspect.signature(one).parameters and not is_hidden(one):
            yield name
        return
    for attribute, member in inspect.getmembers(one):
        member = getattr(member, "__func__", member)
        is_public = attribute == "__init__" or not attribute.startswith("_")
        if is_public and inspect.isfunction(member) and not is_hidden(member):
            yield f"{name}.{attribute}"


@pytest.mark.parametrize("name", PUBLIC)
def test_public_function_and_method_removes_local_variables_from_its_errors(name: str) -> None:
    assert list(undecorated(name, PUBLIC[name])) == []


def test_many_public_objects_are_found() -> None:
    assert len(PUBLIC) > 50
    assert {"EncryptedArtifactService", "AdkTables", "open_source", "erase_user"} <= set(PUBLIC)


# --- arguments that fail -------------------------------------------------------------------------


class Hostile:
    """Shows the needle, and fails at each use."""

    def __repr__(self) -> str:
        return NEEDLE

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __len__(self) -> int:
        raise RuntimeError

    __fspath__ = __iter__ = __bool__ = __eq__ = __call__ = __len__  # type: ignore[assignment]
    __hash__ = object.__hash__


SECRETS: dict[str, Any] = {
    "object": Hostile(),
    "dict": {NEEDLE: NEEDLE, "aws_secret_access_key": NEEDLE},
    "list": [NEEDLE],
    "bytes": NEEDLE.encode(),
    "URL": f"unknown+driver://user:{NEEDLE}@localhost:1/database",
    "store": f"s3://user:{NEEDLE}@bucket/prefix",
}


def valid(tmp_path: Path) -> dict[str, Any]:
    """Arguments that are accepted, by the names of parameters."""
    backend = AesGcmBackend(bytes(range(32)))
    url = f"sqlite:///{tmp_path}/s.db"
    sessions = EncryptedSessionService(url, backend)
    return {
        "backend": backend,
        "db": Database(url, backend),
        "db_url": url,
        "url": url,
        "inner": InMemorySessionService(),
        "service": sessions,
        "session_service": sessions,
        "source": migration.AdkTables(":memory:"),
        "store": tmp_path,
        "options": {},
        "app_name": "app",
        "user_id": "user",
        "key": bytes(range(32)),
        "passphrase": "correct horse battery staple",
        "path": tmp_path / "file",
    }


async def shown_by_call(call: Callable[[], Any]) -> str:
    """Return what the error of *call* shows, or an object with keys that *call* returns."""
    try:
        result = call()
        if inspect.isawaitable(result):
            async with asyncio.timeout(5):
                result = await result
    except BaseException as error:
        return shown_by(error)
    return repr(result) if isinstance(result, HoldsSecrets) else ""


def shown_by(error: BaseException) -> str:
    """What an error reporter records, and what a reader of the log sees."""
    captured = traceback.TracebackException.from_exception(error, capture_locals=True)
    captured.stack[:] = [one for one in captured.stack if "/test_" not in one.filename]
    return locals_of(error) + "".join(captured.format())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PUBLIC)
async def test_secret_argument_is_shown_neither_by_an_error_nor_by_the_object(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, base = PUBLIC[name], valid(tmp_path)
    if inspect.isabstract(call):
        return
    parameters = inspect.signature(call).parameters.values()
    given = {
        one.name: base.get(one.name, Hostile()) for one in parameters if one.default is one.empty
    }
    given = {one.name: given[one.name] for one in parameters if one.name in given and one.kind < 4}
    for one, (kind, secret) in product(parameters, SECRETS.items()):
        if isinstance(secret, str) and not re.search("ur[il]|store", one.name):
            continue  # a text may be quoted, such as the name of a file
        values = {**given, one.name: secret}
        positional = [
            values.pop(other.name)
            for other in parameters
            if other.kind is other.POSITIONAL_ONLY and other.name in values
        ]
        if one.kind is one.VAR_POSITIONAL:
            positional.append(values.pop(one.name))
        shown = await shown_by_call(partial(call, *positional, **values))
        assert NEEDLE not in shown, (one.name, kind)


# --- objects that hold keys ----------------------------------------------------------------------


# Objects of other libraries that hold a key.
CIPHERS = (AESGCM, Fernet, HMAC)


def holders(keys: set[bytes]) -> dict[type, object]:
    """Return an object of each class of this package that holds a key, or a cipher, itself."""
    found: dict[type, object] = {}
    for one in gc.get_objects():
        kind = type(one)
        if str(kind.__module__).startswith("adk_secure_sessions.") and any(
            (isinstance(value, bytes | bytearray) and bytes(value) in keys)
            or isinstance(value, CIPHERS)
            for value in values_of(one)
        ):
            found[kind] = one
    return found


def values_of(one: Any) -> Iterator[object]:
    """Yield the attributes of *one*, and what is in those that are containers."""
    for value in gc.get_referents(one):
        yield value
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            yield from value


def assert_kept(one: object) -> None:
    for how, take in COPIES.items():
        text = ""
        try:
            take(one)
        except TypeError as error:
            text = str(error)
        assert "holds secrets" in text, f"{type(one)} by {how}"


async def test_object_that_holds_a_key_is_neither_pickled_nor_copied_nor_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: set[bytes] = set()
    original = os.urandom

    def recorded(size: int) -> bytes:
        made = original(size)
        if size == 32:
            keys.add(made)
        return made

    monkeypatch.setattr(os, "urandom", recorded)
    who: dict[str, Any] = {"app_name": "app", "user_id": "user"}
    seen: dict[type, object] = {}
    root = original(32)
    keys.add(root)
    url = f"sqlite:///{tmp_path}/s.db"
    backend, other = AesGcmBackend(root), FernetBackend(PassphraseKey("correct horse battery"))
    alive: list[object] = [
        backend,
        other,
        backend.cipher(root),
        other.cipher(root),
        Package1xKeys([root]),
    ]
    async with EncryptedSessionService(url, backend, [other]) as sessions:
        session = await sessions.create_session(**who, session_id="s")
        artifacts = EncryptedArtifactService(sessions, tmp_path / "blobs")
        memory = EncryptedMemoryService(sessions)
        content = types.Part(text="text" * 30_000)
        await artifacts.save_artifact(**who, filename="user:f", artifact=content)
        stream = await artifacts.open_stream(**who, filename="user:f")
        version = await artifacts._find(("app", "user", '["artifact", null, "user:f"]'), None)
        assert stream is not None
        pieces = aiter(stream)
        await anext(pieces)
        await memory.add_session_to_memory(session)
        wrapper = EncryptedSessionWrapper(InMemorySessionService(), backend, key_db_url=":memory:")
        async with wrapper, Database(url, backend, [other]) as db:
            await wrapper.create_session(**who, state={"k": 1})
            await rotate_master(db)
            await verify(db)
            alive += [sessions, artifacts, memory, stream, version, wrapper, db]
            seen = holders(keys)
            assert {kind.__name__ for kind in seen} >= {"Aes256Gcm", "IndexMaster", "Blob"}
            for one in (*seen.values(), *alive):
                assert_kept(one)
                assert not any(key.hex() in repr(one) or repr(key) in repr(one) for key in keys)
        await pieces.aclose()  # type: ignore[attr-defined]


def test_these_tests_find_a_function_that_is_not_decorated() -> None:
    class Careless:
        def __init__(self, key: str) -> None:
            raise ValueError

        def method(self) -> None: ...

    assert list(undecorated("Careless", Careless)) == ["Careless.__init__", "Careless.method"]
    with pytest.raises(ValueError) as info:  # noqa: PT011
        Careless(NEEDLE)
    hidden = hides_locals(Careless)
    assert list(undecorated("Careless", hidden)) == []
    assert info.value.__traceback__ is not None
