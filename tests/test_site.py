"""The built site is complete, and its pages load nothing from other servers."""

import json
import logging
import re
from html.parser import HTMLParser
from logging.handlers import MemoryHandler
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests import chromium
from tests.accessibility import served
from tests.pages import PROJECT, ROOT

# The environments that test one release of google-adk do not have it.
pytest.importorskip("mkdocs", reason="the site needs the group docs")
pytestmark = [
    pytest.mark.soak,  # `make site` builds the site, too, and rejects links that lead nowhere
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
]

# The tags whose content a browser fetches by itself, and the attribute with its address.
LOADED = {
    "audio": "src", "embed": "src", "iframe": "src", "image": "href", "img": "src", "input": "src",
    "object": "data", "script": "src", "source": "src", "track": "src", "use": "href",
    "video": "src",
}  # fmt: skip
LINKS_THAT_LOAD = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch"}
LINKS_THAT_LOAD |= {"modulepreload", "manifest", "apple-touch-icon"}
IN_CSS = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")


class Html(HTMLParser):
    """The addresses that a page loads, its links, and the ids that links can lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self._style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self._style = tag == "style"
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and LINKS_THAT_LOAD & set(given.get("rel", "").split()):
            self.loads.append(given.get("href", ""))
        self.loads += [given[name] for name in (LOADED.get(tag), "poster") if name in given]
        if "srcset" in given:
            self.loads += [part.split()[0] for part in given["srcset"].split(",") if part.strip()]
        self.loads += loaded_by_css(given.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self._style:
            self.loads += loaded_by_css(data)

    def handle_endtag(self, tag: str) -> None:
        self._style = False


def loaded_by_css(text: str) -> list[str]:
    return [one or other for one, other in IN_CSS.findall(text)]


def is_elsewhere(url: str) -> bool:
    return urlsplit(url).scheme not in ("", "data") or url.startswith("//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make site` builds it; a warning is a failure."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    directory = tmp_path_factory.mktemp("site")
    handler = MemoryHandler(1000, flushOnClose=False)
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("mkdocs")
    logger.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.chdir(ROOT)
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(directory))
        config.plugins.on_startup(command="build", dirty=False)
        try:
            build(config)
        finally:
            config.plugins.on_shutdown()
            logger.removeHandler(handler)
    assert [record.getMessage() for record in handler.buffer] == []
    return directory


@pytest.fixture(scope="module")
def html(site: Path) -> dict[str, Html]:
    """The pages by address, such as `api.html`."""
    found = {
        path.relative_to(site).as_posix(): Html(path.read_text(encoding="utf-8"))
        for path in site.rglob("*.html")
    }
    assert {"index.html", "api.html"} <= found.keys()
    return found


def test_nothing_is_loaded_from_other_servers(site: Path, html: dict[str, Html]) -> None:
    loads = {name: page.loads for name, page in html.items()}
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        loads[path.name] = loaded_by_css(path.read_text(encoding="utf-8"))
    assert any("stylesheets" in url for url in loads["index.html"]), "the search finds nothing"
    assert [(name, url) for name, urls in loads.items() for url in urls if is_elsewhere(url)] == []


def test_picture_shows_real_rows_of_two_databases(site: Path) -> None:
    made = re.findall("<text [^>]*>([^<]*)", (site / "index.html").read_text(encoding="utf-8"))
    readme = re.findall("<text [^>]*>([^<]*)", (ROOT / "docs/two-databases.svg").read_text())
    assert [one for one in made if "ya29" in one or "allergic" in one]
    ciphertext = re.compile("[0-9a-f]{30,}( …)?")
    visible = [[one for one in texts if not ciphertext.fullmatch(one)] for texts in (made, readme)]
    assert visible[0] == visible[1], "make the README's copy again: docs/hooks/two_databases.py"
    assert set(made) != set(readme), "the picture was not made by this build"


# What people search for, by the page that must be the first result.
SEARCHES = {
    "adk-commands.html": "adk api_server, adk web, start adk web",
    "adk-plaintext.html": "plaintext",
    "artifacts.html": "encrypt artifacts files, encrypt files, s3, uploaded files",
    "audit.html": "audit who read session, who read session",
    "benchmarks.html": (
        "encryption performance overhead, overhead, performance, slower than plaintext, "
        "throughput, workers"
    ),
    "comparison.html": "attacker database write",
    "compliance.html": "compliance, is it hipaa compliant",
    "databases.html": "cloud sql, custom engine, read replica, gunicorn multiple workers",
    "erasure.html": (
        "90 days, data retention, delete old sessions, delete user data, expiration, expire, "
        "gdpr delete, right to be forgotten, session expiry, session lifetime, ttl"
    ),
    "format.html": "decrypt in Java, read from other language",
    "index.html": (
        "license, oauth token, plaintext fields, what is encrypted, what is not encrypted"
    ),
    "key-services.html": (
        "aws kms rotation, aws secrets manager, azure key vault, cloud run, docker, hsm, k8s, "
        "kms, kms cost, kubernetes, multi-tenant"
    ),
    "limits.html": (
        "compaction, concurrent append error, last 50 events, list sessions slow, "
        "long conversation, max event size, list sessions pagination, pagination, race condition, "
        "stale session, tools and callbacks"
    ),
    "migrate.html": (
        "delete old plaintext, encrypt existing database, gdpr export, go back to adk, import "
        "existing sessions, migrate DatabaseSessionService, migrate to encrypted without "
        "downtime, migrate without downtime, plaintext left after migration, uninstall, zero "
        "downtime migration"
    ),
    "operations-reference.html": (
        "downgrade, postgres grants, postgresql permissions, privileges, rolling upgrade shared "
        "database, two versions same database"
    ),
    "operations.html": (
        "backup, backup restore, integrity check, kms down, kms outage, leaked key, lose key, "
        "lose master key, lost key, stolen key"
    ),
    "rotation.html": (
        "annual key rotation, how to rotate keys, key rotation, key rotation no downtime, key "
        "rotation without downtime, rotate"
    ),
    "search.html": "search by state",
    "security.html": (
        "copy old row, database administrator, replay attack, swap events between users"
    ),
    "telemetry.html": "adk tracing content, spans contain prompts",
    "troubleshooting.html": "WrongKeyError, stale session error",
    "tutorial.html": "install, python versions, supported versions",
    "wrapper.html": "redis, vertex",
}
# Asks the theme's own worker.  The numbers of its messages: 0 builds the index, 2 is a query.
ASK = """(async () => {
    const page = JSON.parse(document.querySelector("#__config").textContent)
    const index = await (await fetch("search/search_index.json")).json()
    const worker = new Worker(page.search)
    const ask = (type, data) => new Promise((answer, fail) => {
        worker.onmessage = message => answer(message.data.data)
        worker.onerror = fail
        worker.postMessage({type, data})
    })
    await ask(0, {...index, options: {suggest: false}})
    const first = {}
    for (const query of QUERIES) {
        const {items} = await ask(2, query)
        first[query] = items.length ? items[0][0].location.split("#")[0] : null
    }
    window.first = first
})().catch(error => { window.first = String(error) })"""


@pytest.mark.skipif(chromium.PROGRAM is None, reason="chromium is not installed")
def test_search_finds_the_right_page_first(site: Path) -> None:
    first = {query: page for page, queries in SEARCHES.items() for query in queries.split(", ")}
    with served(site) as url, chromium.browser() as tab:
        tab.open(f"{url}index.html")
        tab.wait_until("Boolean(document.querySelector('#__config'))")
        tab.evaluate(ASK.replace("QUERIES", json.dumps(list(first))))
        tab.wait_until("window.first !== undefined")
        assert tab.evaluate("window.first") == first


def test_every_page_says_the_version(site: Path, html: dict[str, Html]) -> None:
    version = PROJECT["version"]
    if f"## [{version}] - unreleased" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        version += ", unreleased"
    for name in html:
        header = (site / name).read_text(encoding="utf-8").partition("</header>")[0]
        assert f'<span class="release">{version}</span>' in header, name


def test_links_to_the_repository_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows its address yet, so none is invented: RELEASING.md lists the variables."""
    from mkdocs.config import load_config

    monkeypatch.chdir(ROOT)
    names = (
        "ADK_SECURE_SESSIONS_SITE_URL",
        "ADK_SECURE_SESSIONS_REPO_URL",
        "ADK_SECURE_SESSIONS_EDIT_URI",
    )
    for name in names:
        monkeypatch.delenv(name, raising=False)
    config = load_config("mkdocs.yml")
    assert not any((config.site_url, config.repo_url, config.edit_uri))
    values = ("https://docs.example.org/", "https://example.org/clinic/", "edit/main/docs/")
    for name, value in zip(names, values, strict=True):
        monkeypatch.setenv(name, value)
    config = load_config("mkdocs.yml")
    assert (config.site_url, config.repo_url, config.edit_uri) == values


def test_header_with_a_link_to_the_repository_asks_no_other_server() -> None:
    """The theme's script asks the repository's server for its stars, if it finds the mark."""
    from mkdocs.config import load_config

    from docs.hooks.version import on_config, on_post_page

    config = load_config(str(ROOT / "mkdocs.yml"))
    on_config(config)
    partial = Path(str(config.theme.dirs[0])) / "partials" / "source.html"
    theme = partial.read_text(encoding="utf-8")
    assert 'data-md-component="source"' in theme, "the hook is not needed any more"
    header = f'<span class="md-ellipsis"> {config.site_name} </span>{theme}'
    assert 'data-md-component="source"' not in on_post_page(header, config)
