"""Key services whose library is not installed."""

import sys
from collections.abc import Callable

import pytest

from adk_secure_sessions import (
    AwsKmsKey,
    ConfigurationError,
    GcpKmsKey,
    KeyProvider,
    Pkcs11Key,
    VaultKey,
)

# The missing module, the extra that installs it, and the key that needs it.
MISSING: dict[str, tuple[str, str, Callable[[], KeyProvider]]] = {
    "aws": ("botocore", "aws", lambda: AwsKmsKey("alias/clinic")),
    "gcp": ("google.cloud.kms", "gcp", lambda: GcpKmsKey("projects/p")),
    "pkcs11": ("pkcs11", "pkcs11", lambda: Pkcs11Key("clinic/a")),
    "vault": ("httpx", "vault", lambda: VaultKey("transit/clinic", token="t")),
}


@pytest.mark.parametrize(("module", "extra", "make"), MISSING.values(), ids=MISSING)
def test_missing_library_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, module: str, extra: str, make: Callable[[], KeyProvider]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    command = rf"needs {module}: pip install 'adk-secure-sessions\[{extra}\]'"
    with pytest.raises(ConfigurationError, match=command):
        make()
