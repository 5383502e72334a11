"""python -m tests.lock VERSION: names each package that pip installs for the tests, with the hash of its file.

Run by the interpreter whose packages are meant. VERSION is that of torch, such as 2.13; the versions of the packages
are those of constraints-torchVERSION.txt, and the hashes go to locked-torchVERSION.txt.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WHAT = """\
# Every package of the tests, with the hash of its file: Linux on x86_64, Python 3.11, torch {version}.
# `make TORCH={version} lock` writes this file, and `make TORCH={version} LOCKED=1 venv` installs it.
"""


def report(version: str) -> dict[str, Any]:
    """What pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        constraints = f"constraints-torch{version}.txt"
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed")
        subprocess.run([*pip, "--report", str(path), "-c", constraints, ".[test,demo]"], cwd=ROOT, check=True)
        return dict(json.loads(path.read_text(encoding="utf-8")))


def lines(found: dict[str, Any]) -> list[str]:
    """A requirement with a hash for each package but this project. Raises ValueError for one that has no hash."""
    locked = []
    for package in found["install"]:
        name, version, source = package["metadata"]["name"], package["metadata"]["version"], package["download_info"]
        if "dir_info" in source:  # the project itself
            continue
        hashes = source.get("archive_info", {}).get("hashes", {})
        if "sha256" not in hashes:
            raise ValueError(f"{name} {version} comes without a sha256: {source['url']}")
        locked.append(f"{name.lower().replace('_', '-')}=={version} --hash=sha256:{hashes['sha256']}")
    return sorted(locked)


def main() -> None:
    (version,) = sys.argv[1:]
    text = WHAT.format(version=version) + "".join(f"{line}\n" for line in lines(report(version)))
    (ROOT / f"locked-torch{version}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
