"""What other tests rely on of `tests/servers.py`."""

import pytest

from tests.servers import MARIADB_VARIABLE, REQUIRE_VARIABLE, mariadb


def test_missing_server_is_a_skip_or_if_servers_are_required_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(MARIADB_VARIABLE, raising=False)
    monkeypatch.delenv(REQUIRE_VARIABLE, raising=False)
    monkeypatch.setattr("shutil.which", lambda *args, **options: None)
    with pytest.raises(pytest.skip.Exception, match="mariadb-server-core"), mariadb():
        pass
    monkeypatch.setenv(REQUIRE_VARIABLE, "1")
    with pytest.raises(pytest.fail.Exception, match="mariadb-server-core"), mariadb():
        pass
