"""What is installed: the files of the sdist and of a wheel that is built from it, and the backend's entry point."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Left out of the copy that is built: what building does not need, and what an earlier build may have left.
IGNORED = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "build", "dist", "__pycache__", ".*_cache")


def _build(kind: str, source: Path, output: Path) -> None:
    # The hooks themselves, with the setuptools that is installed: no network and no build frontend.
    build = f"import sys; from setuptools import build_meta as hooks; hooks.build_{kind}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(output)], cwd=source, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of a copy of the checkout, which stays clean, its files, and a wheel built from them."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    shutil.copytree(ROOT, source, symlinks=True, ignore=IGNORED)
    output = tmp_path_factory.mktemp("dist")
    _build("sdist", source, output)
    (sdist,) = output.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(output / "files", filter="data")
    _build("wheel", unpacked(output), output)
    return output


def unpacked(built: Path) -> Path:
    """The files of the sdist."""
    (folder,) = (built / "files").iterdir()
    return folder


def expected_modules() -> set[str]:
    """Every module of the package, by the name under which it is installed."""
    files = {*(ROOT / "mhc_compile").rglob("*.py"), *(ROOT / "mhc_compile" / "passes").rglob("*.py")}
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_the_wheel_has_every_module_once(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    modules = {name for name in names if name.endswith(".py")}
    assert "mhc_compile/passes/__init__.py" in modules
    assert modules == expected_modules()
    assert {"mhc_compile/py.typed", *(f"mhc_compile/page/page.{kind}" for kind in ("css", "html", "js"))} <= {*names}


def test_the_wheel_registers_the_backend(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        parser = configparser.ConfigParser()
        parser.read_string(archive.read(entry_points).decode())
    assert dict(parser["torch_dynamo_backends"]) == {"mhc": "mhc_compile.entry:REGISTERED"}


def test_the_sdist_has_every_module_as_a_file(built: Path) -> None:
    """A link in the archive would dangle: what it points to is not in the sdist under its own name."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {member.name.split("/", 1)[-1]: member for member in archive.getmembers()}
    assert expected_modules() <= members.keys()
    assert all(members[name].isfile() for name in expected_modules())
    assert {"LICENSE", "README.md", "pyproject.toml"} <= members.keys()


def test_the_sdist_has_the_whole_checkout(built: Path) -> None:
    """But for what belongs to git and to continuous integration; the passes are in the package alone."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout, so what belongs to the project is unknown")
    names = [name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]
    left = [name for name in names if not (unpacked(built) / name).is_file() and not name.startswith("passes/")]
    assert sorted(left) == [".ci/run", ".gitignore"]


@pytest.mark.thorough
def test_the_tests_run_from_the_sdist(built: Path) -> None:
    """All can be collected, and some of each kind pass: operators, passes, pages and packages."""
    folder = unpacked(built)
    around = {**os.environ, "PYTHONPATH": str(folder)}

    def pytest_says(*arguments: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=folder, env=around, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:]
        return done.stdout

    assert " tests collected" in pytest_says("--collect-only")
    chosen = ("tests/test_house.py", "tests/test_readme.py", "tests/test_names.py", "tests/ops/test_argument_errors.py")
    assert " passed" in pytest_says("--thin", "1", *chosen, "tests/passes/test_one_site.py")
    place = [sys.executable, "-c", "import mhc_compile; print(mhc_compile.__file__)"]
    imported = subprocess.run(place, cwd=folder, env=around, capture_output=True, text=True, check=True).stdout
    assert Path(imported.strip()).is_relative_to(folder)


def run_installed(built: Path, folder: Path, code: str) -> str:
    """What `code` prints where the wheel is unpacked in `folder` and the checkout cannot be seen."""
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_installed_package_has_its_passes(built: Path, tmp_path: Path) -> None:
    path = run_installed(built, tmp_path, "import mhc_compile.passes as p; print(p.__file__)")
    assert Path(path) == tmp_path / "mhc_compile" / "passes" / "__init__.py"


def test_the_backend_is_found_without_an_import(built: Path, tmp_path: Path) -> None:
    """torch finds "mhc" through the installed package's entry point, without any import of the package."""
    code = (
        "import sys, torch._dynamo as d\n"
        "assert 'mhc' in d.list_backends(), d.list_backends()\n"
        "assert 'mhc_compile' not in sys.modules\n"
        "from torch._dynamo.backends.registry import lookup_backend\n"
        "assert callable(lookup_backend('mhc'))\n"
        "assert lookup_backend('mhc') is lookup_backend('mhc')\n"
        "assert 'mhc_compile.backend' not in sys.modules\n"
        "print(sys.modules['mhc_compile'].__file__)\n"
    )
    path = run_installed(built, tmp_path, code)
    assert Path(path) == tmp_path / "mhc_compile" / "__init__.py"


@pytest.mark.slow
def test_threads_that_all_use_the_backend_first(built: Path, tmp_path: Path) -> None:
    """Eight threads of a fresh process ask for the backend and compile at the same time."""
    code = (
        "import threading, torch\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "begin = threading.Barrier(8)\n"
        "def work():\n"
        "    begin.wait()\n"
        "    return torch.compile(lambda x: x + 1, backend='mhc')(torch.ones(2)).tolist() == [2.0, 2.0]\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    done = [pool.submit(work) for _ in range(8)]\n"
        "    print(sum(one.result() for one in done))\n"
    )
    assert run_installed(built, tmp_path, code) == "8"


def test_the_backend_is_registered_once_whatever_is_imported_first(built: Path, tmp_path: Path) -> None:
    code = (
        "import mhc_compile\n"
        "mhc_compile.backend, mhc_compile.verify\n"
        "from torch._dynamo.backends.registry import lookup_backend\n"
        "first = lookup_backend('mhc')\n"
        "import mhc_compile.entry\n"
        "assert lookup_backend('mhc') is first is mhc_compile.entry.mhc\n"
        "from importlib.metadata import version\n"
        "print(version('mhc-compile'), mhc_compile.__version__)\n"
    )
    assert run_installed(built, tmp_path, code) == "0.1.0 0.1.0"
