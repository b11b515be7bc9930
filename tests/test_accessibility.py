"""The pages of the built site can be read by everybody, as far as a program can tell."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import accessibility, chromium
from tests.pages import ROOT

pytestmark = [
    pytest.mark.skipif(chromium.PROGRAM is None, reason="chromium is not installed"),
    pytest.mark.skipif(
        not accessibility.cached_axe().exists(),
        reason="axe-core is not in the cache; `make a11y` stores it there",
    ),
]

PAGE = """<!DOCTYPE html><html lang="en"><title>A page</title><main><h1>A page</h1>
{}<a href="#one" class="md-skip">Skip</a> <a href="#two">Another link</a></main></html>"""
# The content of each page, and the texts of its problems.
PAGES = {
    "": [],
    '<img src="data:,">': ["image-alt: img"],
    '<p style="color: #999">Text</p>': ["color-contrast: p"],
    '<details><summary>More</summary><p style="color: #999">Text</p></details>': [
        "the first stop of Tab is no link",
        "color-contrast: p",
    ],
    '<p style="width: 2000px">Text</p>': ["px wider than the window"],
    "<style>a:focus { outline: none }</style>": ["focus is not visible", "focus is not visible"],
    '<a href="#zero">First</a>': ["the first stop of Tab is no link"],
}


def test_checker_finds_each_problem(tmp_path: Path) -> None:
    for number, content in enumerate(PAGES):
        page = PAGE.format(content)
        (tmp_path / f"page{number}.html").write_text(page, encoding="utf-8")
    names = [f"page{number}.html" for number in range(len(PAGES))]
    problems = accessibility.check(tmp_path, names, accessibility.LOOKS[:1])
    for number, expected in enumerate(PAGES.values()):
        found = [one for one in problems if f"page{number}.html" in one]
        assert len(found) == len(expected), found
        for text in expected:
            assert any(text in problem for problem in found), found
    assert len(problems) == sum(map(len, PAGES.values())), problems


@pytest.mark.soak
def test_site_has_no_problem(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site needs the group docs")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True)
    assert accessibility.check(tmp_path) == []
