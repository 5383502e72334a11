"""What mkdocs builds in addition to the files of docs: pages and pictures of the repository that pages link to.

README, CONTRIBUTING and CHANGELOG stand where hosts of repositories look for them. Links between them and the pages of
docs are relative to the repository, so that they work there; here they are made to work in the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Files of the repository by their place in the site.
BESIDE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "examples.md": "examples/README.md"}
PLACES = {source: place for place, source in BESIDE.items()}
FOLDERS = ("results", "examples")


def on_files(files: Files, config: Any) -> Files:
    """Add what does not lie in docs."""
    for place, source in BESIDE.items():
        files.append(File.generated(config, place, content=_as_in_docs((ROOT / source).read_text(encoding="utf-8"))))
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).iterdir()):
            if path.is_file() and path.suffix != ".md":
                files.append(File.generated(config, f"{folder}/{path.name}", abs_src_path=str(path)))
    return files


def _as_in_docs(text: str) -> str:
    """A file that lies in the root of the repository, or one below it, as if it lay in docs."""
    text = re.sub(r"\]\((?:\.\./)?docs/", "](", text)
    return re.sub(r"\]\((?=\w+\.py\))", "](examples/", text)


def on_page_markdown(markdown: str, page: Any, **known: Any) -> str:
    """Links that leave docs lead to where the files are in the site."""

    def placed(match: re.Match[str]) -> str:
        up, target = match[1], match[2]
        inside = "../" * (up.count("../") - 1) if page.file.src_uri not in BESIDE else up
        return f"]({inside}{PLACES.get(target, target)}"

    return re.sub(r"\]\(((?:\.\./)*)((?:results|examples)/[\w./-]+|[A-Z]+\.md)", placed, markdown)
