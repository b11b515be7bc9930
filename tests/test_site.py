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


# What people search for, and the page that must be the first result.
SEARCHES = {
    "90 days": "erasure.html",
    "WrongKeyError": "troubleshooting.html",
    "adk api_server": "adk-commands.html",
    "adk tracing content": "telemetry.html",
    "adk web": "adk-commands.html",
    "annual key rotation": "rotation.html",
    "audit who read session": "audit.html",
    "aws kms rotation": "key-services.html",
    "aws secrets manager": "key-services.html",
    "azure key vault": "key-services.html",
    "backup restore": "operations.html",
    "backup": "operations.html",
    "cloud run": "key-services.html",
    "cloud sql": "databases.html",
    "compliance": "compliance.html",
    "concurrent append error": "limits.html",
    "copy old row": "security.html",
    "custom engine": "databases.html",
    "data retention": "erasure.html",
    "database administrator": "security.html",
    "decrypt in Java": "format.html",
    "delete old plaintext": "migrate.html",
    "delete old sessions": "erasure.html",
    "delete user data": "erasure.html",
    "docker": "key-services.html",
    "downgrade": "operations-reference.html",
    "encrypt existing database": "migrate.html",
    "encrypt files": "artifacts.html",
    "encryption performance overhead": "benchmarks.html",
    "expiration": "erasure.html",
    "expire": "erasure.html",
    "gdpr delete": "erasure.html",
    "gdpr export": "migrate.html",
    "go back to adk": "migrate.html",
    "how to rotate keys": "rotation.html",
    "hsm": "key-services.html",
    "import existing sessions": "migrate.html",
    "install": "tutorial.html",
    "integrity check": "operations.html",
    "is it hipaa compliant": "compliance.html",
    "k8s": "key-services.html",
    "key rotation no downtime": "rotation.html",
    "key rotation without downtime": "rotation.html",
    "key rotation": "rotation.html",
    "kms cost": "key-services.html",
    "kms down": "operations.html",
    "kms outage": "operations.html",
    "kms": "key-services.html",
    "kubernetes": "key-services.html",
    "last 50 events": "limits.html",
    "leaked key": "operations.html",
    "license": "index.html",
    "list sessions slow": "limits.html",
    "long conversation": "limits.html",
    "lose key": "operations.html",
    "lost key": "operations.html",
    "max event size": "limits.html",
    "migrate DatabaseSessionService": "migrate.html",
    "migrate to encrypted without downtime": "migrate.html",
    "migrate without downtime": "migrate.html",
    "multi-tenant": "key-services.html",
    "oauth token": "index.html",
    "overhead": "benchmarks.html",
    "pagination": "limits.html",
    "performance": "benchmarks.html",
    "plaintext fields": "index.html",
    "plaintext left after migration": "migrate.html",
    "plaintext": "adk-plaintext.html",
    "postgres grants": "operations-reference.html",
    "postgresql permissions": "operations-reference.html",
    "privileges": "operations-reference.html",
    "python versions": "tutorial.html",
    "race condition": "limits.html",
    "read from other language": "format.html",
    "read replica": "databases.html",
    "redis": "wrapper.html",
    "replay attack": "security.html",
    "right to be forgotten": "erasure.html",
    "rolling upgrade shared database": "operations-reference.html",
    "rotate": "rotation.html",
    "s3": "artifacts.html",
    "search by state": "search.html",
    "session expiry": "erasure.html",
    "session lifetime": "erasure.html",
    "slower than plaintext": "benchmarks.html",
    "spans contain prompts": "telemetry.html",
    "stale session": "limits.html",
    "start adk web": "adk-commands.html",
    "stolen key": "operations.html",
    "supported versions": "tutorial.html",
    "swap events between users": "security.html",
    "throughput": "benchmarks.html",
    "ttl": "erasure.html",
    "two versions same database": "operations-reference.html",
    "uninstall": "migrate.html",
    "uploaded files": "artifacts.html",
    "vertex": "wrapper.html",
    "what is encrypted": "index.html",
    "what is not encrypted": "index.html",
    "who read session": "audit.html",
    "workers": "benchmarks.html",
    "zero downtime migration": "migrate.html",
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
    with served(site) as url, chromium.browser() as tab:
        tab.open(f"{url}index.html")
        tab.wait_until("Boolean(document.querySelector('#__config'))")
        tab.evaluate(ASK.replace("QUERIES", json.dumps(list(SEARCHES))))
        tab.wait_until("window.first !== undefined")
        assert tab.evaluate("window.first") == SEARCHES


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
