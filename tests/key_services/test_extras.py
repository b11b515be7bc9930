"""Key services whose library is not installed."""

import re
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

# The missing module, the packages to install, and the key that needs the module.
MISSING: dict[str, tuple[str, str, Callable[[], KeyProvider]]] = {
    "aws": ("botocore", "'botocore>=1.36'", lambda: AwsKmsKey("alias/clinic")),
    "gcp": (
        "google.cloud.kms",
        "'google-cloud-kms>=3.4' 'google-crc32c>=1.6'",
        lambda: GcpKmsKey("projects/p"),
    ),
    "pkcs11": ("pkcs11", "'python-pkcs11>=0.9'", lambda: Pkcs11Key("clinic/a")),
    "vault": ("httpx", "'httpx>=0.28'", lambda: VaultKey("transit/clinic", token="t")),
}


@pytest.mark.parametrize(("module", "packages", "make"), MISSING.values(), ids=MISSING)
def test_missing_library_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, module: str, packages: str, make: Callable[[], KeyProvider]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    command = f"needs {module}: pip install {packages}"
    with pytest.raises(ConfigurationError, match=re.escape(command)):
        make()
