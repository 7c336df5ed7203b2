"""What hatchling asks when it builds memfit: the README without relative links, which lead nowhere on an index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_IMAGE = re.compile(r"!\[[^\]]*\]\((?!https?:)([^)\s]+)\)\n*(\*[^*\n]+\*\n*)?")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)([^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Sets the description of the distribution."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the README into ``metadata``."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme_for_an_index(text, repository)}


def readme_for_an_index(text: str, repository: str | None) -> str:
    """Return the README with links and images that lead into the ``repository``, an address such as https://host/name.

    Without one, links become their text, and images go with the captions below them.
    """
    if repository is None:
        return _LINK.sub(r"\1", _IMAGE.sub("", text))
    address = repository.rstrip("/")
    text = _IMAGE.sub(lambda match: match[0].replace(f"({match[1]})", f"({address}/raw/main/{match[1]})"), text)
    return _LINK.sub(rf"[\1]({address}/blob/main/\2)", text)
