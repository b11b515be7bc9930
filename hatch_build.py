"""Makes the description that a package index shows: the README, with links that work there.

An index shows the description alone, so a link such as `docs/tutorial.md` leads nowhere.  If
`pyproject.toml` has the address of the repository (`Repository` in `[project.urls]`), such a link
gets the address of the file at the tag of this version.  Without an address, only its text stays:
RELEASING.md lists the addresses that are not known yet.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_MARKER = re.compile(r"^<!-- --8<-- .*-->\n", re.MULTILINE)  # of a part that the site includes


def description(readme: str, repository: str | None, version: str) -> str:
    """Return *readme* for a package index.

    Args:
        readme: The text of README.md.
        repository: The address of the repository, or None if it is not known.
        version: The version of the package.
    """

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        if re.match(r"[a-z]+:", target):
            return found[0]
        if repository is None:
            return text
        return f"[{text}]({repository.rstrip('/')}/blob/v{version}/{target})"

    # Every second part is a block of code.
    parts = _FENCED.split(_MARKER.sub("", readme))
    return "".join(part if i % 2 else _LINK.sub(link, part) for i, part in enumerate(parts))


class DescriptionHook(MetadataHookInterface):
    """Sets the metadata field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": description(readme, repository, metadata["version"]),
        }
