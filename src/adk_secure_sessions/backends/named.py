"""Create backends from their names and from key specs, for command lines and URIs."""

import warnings
from collections.abc import Callable, Sequence

from adk_secure_sessions.backends.aes_gcm import AesGcmBackend
from adk_secure_sessions.backends.fernet import FernetBackend
from adk_secure_sessions.backends.noop import NoOpBackend
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.keys.data_keys import EncryptionBackend
from adk_secure_sessions.keys.providers import KeyProvider
from adk_secure_sessions.keys.specs import key_provider

_CIPHERS: dict[str, Callable[[KeyProvider], EncryptionBackend]] = {
    "aesgcm": AesGcmBackend,
    "fernet": FernetBackend,
}
DEFAULT = "aesgcm"
NO_OP = "no-op"
NAMES = (*_CIPHERS, NO_OP)


def backends_for(
    names: Sequence[str], specs: Sequence[str]
) -> tuple[EncryptionBackend, Sequence[EncryptionBackend]]:
    """Create each backend of *names* (of `NAMES`) with each root key of *specs*.

    Return the first backend, which writes, and the other backends, which only decrypt.  Only with
    `NO_OP` may *specs* be empty.
    """
    roots = [_root(spec) for spec in specs]
    made: list[EncryptionBackend] = []
    for name in dict.fromkeys(names):
        if name == NO_OP:
            with warnings.catch_warnings():
                # Do not warn again: the documentation of the name `no-op` contains this warning.
                warnings.simplefilter("ignore")
                made.append(NoOpBackend())
        else:
            made += [_CIPHERS[name](root) for root in roots]
    # A service has only the root keys of its backends.  If no-op is the only name, add a backend
    # for each root key, so that the service can unwrap the master keys.  Any cipher would do.
    if not set(names) - {NO_OP}:
        made += [AesGcmBackend(root) for root in roots]
    return made[0], made[1:]


def _root(spec: str) -> KeyProvider:
    if ":" not in spec:
        raise ConfigurationError(
            "give a key spec such as env:NAME or file:PATH, never the key itself: "
            "other users can read command lines"
        )
    return key_provider(spec)
