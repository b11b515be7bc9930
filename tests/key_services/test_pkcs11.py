"""Root keys in a token."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pkcs11
import pytest

from adk_secure_sessions import (
    ConfigurationError,
    KeyServiceError,
    Pkcs11Key,
    Reason,
    TamperedError,
    key_provider,
)
from tests.key_services.softhsm import PIN, SoftHsm
from tests.key_services.support import CONTEXT, MASTER, failure
from tests.processes import results

pytestmark = pytest.mark.usefixtures("no_pauses")


@pytest.fixture
def key(softhsm: SoftHsm) -> Pkcs11Key:
    return named("a")


def named(label: str, **options: Any) -> Pkcs11Key:
    return Pkcs11Key(f"clinic/{label}", **options)


def before_each_login(monkeypatch: pytest.MonkeyPatch, do: Callable[[str], object]) -> None:
    """Have *do* called with the PIN before each login: SoftHSM never hangs, and counts nothing."""
    load = pkcs11.lib

    class Token:
        def __init__(self, token: Any) -> None:
            self._token = token

        def open(self, user_pin: str) -> Any:
            do(user_pin)
            return self._token.open(user_pin=user_pin)

    class Library:
        def __init__(self, path: str) -> None:
            self._library = load(path)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._library, name)

        def get_token(self, **wanted: Any) -> Token:
            return Token(self._library.get_token(**wanted))

    monkeypatch.setattr(pkcs11, "lib", Library)


async def test_wrap_has_the_documented_format(softhsm: SoftHsm, key: Pkcs11Key) -> None:
    from pkcs11 import GCMParams, Mechanism

    wrapped = await key.wrap(MASTER, CONTEXT)
    assert (wrapped[:1], len(wrapped)) == (b"\x06", 1 + 12 + 32 + 16)
    with softhsm.token.open(user_pin=PIN) as session:
        parameters = GCMParams(wrapped[1:13], b"\x06" + CONTEXT, 128)
        found = session.get_key(label="a")
        opened = found.decrypt(
            wrapped[13:], mechanism=Mechanism.AES_GCM, mechanism_param=parameters
        )
    assert opened == MASTER


# --- configuration -------------------------------------------------------------------------------


async def test_spec_names_a_key(softhsm: SoftHsm) -> None:
    key = key_provider("pkcs11:clinic/a")
    assert key.key_id == "pkcs11:clinic/a"
    assert await key.unwrap(await key.wrap(MASTER, CONTEXT), CONTEXT) == MASTER
    assert named("a", key_id="the old token").key_id == "the old token"


async def test_label_may_contain_slashes(softhsm: SoftHsm) -> None:
    softhsm.new_key("a/b")
    assert await named("a/b").wrap(MASTER, CONTEXT)


def test_keys_of_two_modules_differ(softhsm: SoftHsm) -> None:
    assert named("a") == named("a", module=softhsm.module) != named("a", module="/another.so")


@pytest.mark.parametrize("name", ["", "clinic", "clinic/", "/a"])
def test_invalid_name_is_rejected(softhsm: SoftHsm, name: str) -> None:
    with pytest.raises(ConfigurationError, match="TOKEN/LABEL"):
        Pkcs11Key(name)


@pytest.mark.parametrize("variable", ["PKCS11_MODULE", "PKCS11_PIN"])
def test_variable_that_is_missing_is_named(
    softhsm: SoftHsm, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv(variable)
    with pytest.raises(ConfigurationError, match=variable):
        named("a")


def test_pin_that_is_not_text_is_rejected_without_repeating_it(
    softhsm: SoftHsm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PKCS11_PIN", "needle\udcff")  # what Python makes of the byte FF
    with pytest.raises(ConfigurationError, match="'PKCS11_PIN' is not text in UTF-8") as info:
        named("a")
    assert "needle" not in repr(info.value)
    with pytest.raises(ConfigurationError, match="the PIN is not text in UTF-8") as info:
        named("a", pin="needle\udcff")
    assert "needle" not in repr(info.value)


async def test_pin_may_be_in_a_private_file(
    softhsm: SoftHsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pin"
    file.write_text(f"{PIN}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PKCS11_PIN_FILE", str(tmp_path / "missing"))
    await named("a").wrap(MASTER, CONTEXT)  # the variable with the PIN comes first
    monkeypatch.setenv("PKCS11_PIN", "wrong")
    await named("a", pin_file=file).wrap(MASTER, CONTEXT)
    monkeypatch.delenv("PKCS11_PIN")
    await named("a", pin_file=file).wrap(MASTER, CONTEXT)
    monkeypatch.setenv("PKCS11_PIN_FILE", str(file))
    await named("a").wrap(MASTER, CONTEXT)
    file.write_bytes(b"needle\xff")
    with pytest.raises(ConfigurationError, match="does not hold a PIN") as info:
        named("a")
    assert "needle" not in str(info.value)
    file.write_text("\n")
    with pytest.raises(ConfigurationError, match="does not hold a PIN"):
        named("a")
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        named("a")


async def test_library_that_cannot_be_loaded_is_named(softhsm: SoftHsm) -> None:
    error = await failure(named("a", module="/nowhere/module.so"))
    assert "'/nowhere/module.so' cannot be loaded" in str(error)
    assert not error.retryable


async def test_library_that_other_code_has_initialized_is_named(
    softhsm: SoftHsm, tmp_path: Path
) -> None:
    """Through another path, the library is the same for the system, but not for python-pkcs11."""
    assert softhsm.token
    another = tmp_path / "module.so"
    another.symlink_to(softhsm.module)
    error = await failure(named("a", module=another))
    assert f"other code of this process has initialized the library {str(another)!r}" in str(error)
    assert not error.retryable


# --- keys and PINs -------------------------------------------------------------------------------


async def test_key_that_can_be_extracted_is_rejected(softhsm: SoftHsm) -> None:
    softhsm.new_key("extractable", EXTRACTABLE=True)
    softhsm.new_key("readable", SENSITIVE=False)
    for label in ("extractable", "readable"):
        assert "key can be extracted from its token" in str(await failure(named(label)))


async def test_key_of_another_length_is_rejected(softhsm: SoftHsm) -> None:
    softhsm.new_key("short", bits=128)
    assert "128 bits" in str(await failure(named("short")))


async def test_key_that_may_not_encrypt_is_rejected(softhsm: SoftHsm) -> None:
    softhsm.new_key("idle", ENCRYPT=False)
    error = await failure(named("idle"))
    assert "may not be used" in str(error)
    assert not error.retryable


async def test_label_of_no_key_or_of_two_is_reported(softhsm: SoftHsm) -> None:
    softhsm.new_key("twice")
    softhsm.new_key("twice")
    assert "2 AES keys" in str(await failure(named("twice")))
    assert "0 AES keys" in str(await failure(named("missing")))
    assert "no token" in str(await failure(Pkcs11Key("missing/a")))


async def test_wrong_pin_is_tried_once_only(
    softhsm: SoftHsm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens lock after a few wrong PINs, and a start makes two calls at once."""
    tried: list[str] = []
    before_each_login(monkeypatch, tried.append)
    key = named("a", pin="needle")
    errors = await asyncio.gather(*(failure(key) for _ in range(3)))
    errors.append(await failure(key))
    assert {str(error) for error in errors} == {
        "root key 'pkcs11:clinic/a': the PIN is wrong (PinIncorrect); "
        "correct it: tokens lock after a few wrong PINs"
    }
    assert len(tried) == 1
    assert len({id(error) for error in errors}) == 4  # an error that is raised again grows


async def test_login_by_other_code_of_the_process_does_not_matter(
    softhsm: SoftHsm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adk_secure_sessions.keys.pkcs11._modules", {})  # as in a new process
    key = named("a")
    with softhsm.token.open(user_pin=PIN) as session:
        wrapped = await key.wrap(MASTER, CONTEXT)
        assert await key.unwrap(wrapped, CONTEXT) == MASTER
        assert session.get_key(label="b")  # the session of the other code is still open
    assert await key.unwrap(wrapped, CONTEXT) == MASTER


# --- errors of the module ------------------------------------------------------------------------

ADVICE = {
    "FunctionRejected": "check the PIN",
    "PinTooWeak": "set a new PIN",
    "UserPinNotInitialized": "set the PIN",
    "MechanismInvalid": "use a module with CKM_AES_GCM",
    "MechanismParamInvalid": "accepts nonces",
    "MultipleTokensReturned": "give each a different label",
    "NoSuchToken": "check the label",
    "PinExpired": "set a new PIN",
    "PinIncorrect": "correct it",
    "PinInvalid": "correct it",
    "PinLenRange": "correct it",
    "PinLocked": "have the security officer unlock it",
    "Unmapped error code 0x68": "has CKA_ENCRYPT and CKA_DECRYPT",
    "KeyTypeInconsistent": "has CKA_ENCRYPT and CKA_DECRYPT",
    "UserNotLoggedIn": "has CKA_ENCRYPT and CKA_DECRYPT",
}


@pytest.mark.parametrize(
    "name", [*ADVICE, "DeviceRemoved", "PKCS11Error", "Unmapped error code 0x800000a1"]
)
async def test_error_says_what_to_check_and_whether_to_try_again(
    softhsm: SoftHsm, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tried = []

    def fail(pin: str) -> None:
        tried.append(pin)
        # python-pkcs11 has no classes for some codes, among them all that vendors define.
        raise getattr(pkcs11.exceptions, name, lambda: pkcs11.PKCS11Error(name))()

    before_each_login(monkeypatch, fail)
    error = await failure(named("a"))
    # An unknown code at a login may be about the PIN, and a token locks after a few wrong ones.
    is_temporary = name in ("DeviceRemoved", "PKCS11Error")
    assert ADVICE.get(name, "check that it is plugged in and works") in str(error)
    assert f"({name.removeprefix('Unmapped error code ')})" in str(error)
    assert error.retryable == is_temporary
    assert len(tried) == (3 if is_temporary else 1)


@pytest.mark.parametrize(("of", "name"), [(Pkcs11Key, "_find_key"), (pkcs11, "lib")])
async def test_unknown_error_of_the_initialization_and_after_the_login_is_temporary(
    key: Pkcs11Key, monkeypatch: pytest.MonkeyPatch, of: Any, name: str
) -> None:
    await key.wrap(MASTER, CONTEXT)  # the library can be loaded
    tried = []

    def fail(*_: object) -> None:
        tried.append(0)
        raise pkcs11.PKCS11Error("Unmapped error code 0x800000a1")

    monkeypatch.setattr(of, name, fail)
    error = await failure(key)
    assert "the token failed (0x800000a1)" in str(error)
    assert error.retryable is True
    assert len(tried) == 3


async def test_rejected_pin_is_not_tried_again_but_other_errors_are(
    softhsm: SoftHsm, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [pkcs11.exceptions.NoSuchToken, pkcs11.exceptions.PinLocked]
    tried = []

    def fail(pin: str) -> None:
        tried.append(pin)
        raise errors[len(tried) - 1]

    before_each_login(monkeypatch, fail)
    key = named("a")
    for expected in ("no token", "PIN is locked", "PIN is locked"):
        assert expected in str(await failure(key))
    assert len(tried) == 2


class BrokenKey:
    """A key in a token that cannot decrypt anything any more."""

    def __init__(self, key: Any) -> None:
        self._key = key

    def encrypt(self, *arguments: Any, **options: Any) -> Any:
        return self._key.encrypt(*arguments, **options)

    def decrypt(self, data: bytes, **_options: Any) -> bytes:
        assert isinstance(data, bytes)
        raise pkcs11.exceptions.GeneralError


async def test_token_that_fails_is_told_from_a_modified_key(
    key: Pkcs11Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokens report both as a general error."""
    wrapped = await key.wrap(MASTER, CONTEXT)
    find = Pkcs11Key._find_key
    monkeypatch.setattr(Pkcs11Key, "_find_key", lambda self, token: BrokenKey(find(self, token)))
    with pytest.raises(KeyServiceError, match=r"the token failed \(GeneralError\)") as info:
        await key.unwrap(wrapped, CONTEXT)
    assert info.value.retryable


@pytest.mark.parametrize("failures", [0, 1])
async def test_key_is_decrypted_once_and_again_if_the_token_fails_for_a_moment(
    key: Pkcs11Key, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = await key.wrap(MASTER, CONTEXT)
    find, asked = Pkcs11Key._find_key, []

    class Flaky(BrokenKey):
        def decrypt(self, data: bytes, **options: Any) -> bytes:
            asked.append(data)
            if len(asked) <= failures:
                raise pkcs11.exceptions.DeviceMemory
            return bytes(self._key.decrypt(data, **options))

    monkeypatch.setattr(Pkcs11Key, "_find_key", lambda self, session: Flaky(find(self, session)))
    assert await key.unwrap(wrapped, CONTEXT) == MASTER
    assert (len(asked) == 1) == (failures == 0)


def test_label_or_path_that_is_not_text_is_rejected(softhsm: SoftHsm) -> None:
    with pytest.raises(ConfigurationError, match="path of the library is not text in UTF-8"):
        named("a", module="/\udcff.so")
    with pytest.raises(ConfigurationError, match="name of the key is not text in UTF-8"):
        named("\udcff", key_id="x")


@pytest.mark.parametrize(
    ("length", "reason"),
    [(0, Reason.MALFORMED), (1 + 27, Reason.MALFORMED), (1 + 28, Reason.AUTHENTICATION)],
)
async def test_shortened_wrap_is_rejected(key: Pkcs11Key, length: int, reason: Reason) -> None:
    wrapped = await key.wrap(MASTER, CONTEXT)
    with pytest.raises(TamperedError) as info:
        await key.unwrap(wrapped[:length], CONTEXT)
    assert info.value.reason is reason


# --- unplugged tokens, calls that hang, forks ----------------------------------------------------


async def test_call_behind_one_that_hangs_times_out(
    key: Pkcs11Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, hangs = threading.Event(), threading.Event()
    logins = []

    def hang(pin: str) -> None:
        logins.append(pin)
        hangs.set()
        free.wait(10)

    before_each_login(monkeypatch, hang)
    hanging = asyncio.create_task(key.wrap(MASTER, CONTEXT))
    while not hangs.is_set():
        await asyncio.sleep(0.01)
    began = time.perf_counter()
    try:
        error = await failure(named("a", timeout=0.1, attempts=2))
        assert len(logins) == 1  # only one thread may use the library
    finally:
        free.set()
        await hanging
    assert time.perf_counter() - began < 2
    assert error.retryable


def test_forked_process_does_not_wait_for_a_thread_that_it_lacks(softhsm: SoftHsm) -> None:
    environment = {name: os.environ[name] for name in ("SOFTHSM2_CONF", "PKCS11_MODULE")}
    assert results((fork_during_a_call, environment)) == [[0]]


def fork_during_a_call(say: Callable[[object], None], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    key = Pkcs11Key("clinic/a", pin=PIN, timeout=5.0, attempts=1)
    wrapped = asyncio.run(key.wrap(MASTER, CONTEXT))
    free, hangs = threading.Event(), threading.Event()

    def hang(_pin: str) -> None:
        hangs.set()
        free.wait(20)

    with pytest.MonkeyPatch.context() as patch:
        before_each_login(patch, hang)
        thread = threading.Thread(target=lambda: asyncio.run(key.wrap(MASTER, CONTEXT)))
        thread.start()
        hangs.wait(20)
    if pid := os.fork():
        _, status = os.waitpid(pid, 0)
        free.set()
        thread.join()
        say(os.waitstatus_to_exitcode(status))
    else:
        opened = asyncio.run(key.unwrap(wrapped, CONTEXT))
        os._exit(opened != MASTER)
