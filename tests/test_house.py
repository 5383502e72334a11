"""The rules of the house: who may import whom, what is documented, and what must not be in the files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mhc_compile"

# What the modules of each part may import from the package, as prefixes of dotted names. The longest part
# that a module belongs to decides; a module of none of them may import anything.
ALLOWED = {
    "mhc_compile.forms": (),
    "mhc_compile.encoding": (),
    "mhc_compile.budget": (),
    # The guard asks compat what Dynamo's own exceptions are, and stands around what compat puts into Inductor.
    "mhc_compile.guard": ("mhc_compile.compat", "mhc_compile.encoding"),
    "mhc_compile.agreement": ("mhc_compile.compat", "mhc_compile.guard"),
    "mhc_compile.compat": ("mhc_compile.budget", "mhc_compile.compat", "mhc_compile.guard", "mhc_compile.encoding"),
    "mhc_compile.kernels": ("mhc_compile.forms", "mhc_compile.encoding", "mhc_compile.kernels"),
    "mhc_compile.ops": (
        "mhc_compile.forms",
        "mhc_compile.encoding",
        "mhc_compile.kernels",
        "mhc_compile.ops",
        "mhc_compile.compat",
    ),
    "mhc_compile.passes": (
        "mhc_compile.agreement",
        "mhc_compile.budget",
        "mhc_compile.guard",
        "mhc_compile.forms",
        "mhc_compile.ops",
        "mhc_compile.encoding",
        "mhc_compile.passes",
        "mhc_compile.compat",
    ),
    # The report knows the page that shows it, and the page knows nothing but reports.
    "mhc_compile.passes.report": ("mhc_compile.ops", "mhc_compile.page", "mhc_compile.encoding", "mhc_compile.compat"),
    "mhc_compile.page": ("mhc_compile.page", "mhc_compile.passes.report", "mhc_compile.encoding"),
    "mhc_compile.passes.lower": (
        "mhc_compile.agreement",
        "mhc_compile.budget",
        "mhc_compile.guard",
        "mhc_compile.forms",
        "mhc_compile.kernels",
        "mhc_compile.ops",
        "mhc_compile.passes",
        "mhc_compile.compat",
    ),
}
# What kernels may import from outside the package, apart from the standard library.
KERNEL_LIBRARIES = {"torch", "triton"}


def python_files() -> list[Path]:
    """Every module of the package, those of passes under their importable name."""
    # Whether a recursive search follows the link depends on the version of Python.
    return sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "passes").rglob("*.py")})


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute dotted names that a module imports, with their lines, relative imports resolved."""
    module = module_name(path)
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            # `from mhc_compile import kernels` imports mhc_compile.kernels, whatever the statement calls it.
            for alias in node.names:
                yield f"{origin}.{alias.name}", node.lineno


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def rule_for(module: str) -> tuple[str, ...] | None:
    """What `module` may import from the package, None where there is no limit."""
    parts = [part for part in ALLOWED if within(module, part)]
    return ALLOWED[max(parts, key=len)] if parts else None


def forbidden_imports(path: Path) -> list[str]:
    module = module_name(path)
    allowed = rule_for(module)
    found = []
    for name, line in imported_names(path):
        inside = within(name, "mhc_compile") or within(name, "passes")
        if within(name, "passes"):
            found.append(f"{module}:{line} imports {name}; it is mhc_compile.{name}")
        elif inside and allowed is not None and not any(within(name, prefix) for prefix in allowed):
            found.append(f"{module}:{line} imports {name}")
        elif not inside and within(module, "mhc_compile.kernels"):
            top = name.split(".")[0]
            if top not in KERNEL_LIBRARIES and top not in sys.stdlib_module_names:
                found.append(f"{module}:{line} imports {name}")
    return found


def test_every_part_imports_only_what_is_below_it() -> None:
    assert [line for path in python_files() for line in forbidden_imports(path)] == []


def test_the_import_rule_sees_every_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker itself: each of these spellings breaks the rule for ops, and is reported with its line."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "mhc_compile" / "ops" / "broken.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import mhc_compile.passes\n"
        "from mhc_compile import backend\n"
        "from .. import explain\n"
        "from ..passes import shadow\n"
        "import passes.shadow\n"
        "from mhc_compile.forms import Rms\n"
        "from . import sinkhorn\n"
    )
    assert forbidden_imports(path) == [
        "mhc_compile.ops.broken:1 imports mhc_compile.passes",
        "mhc_compile.ops.broken:2 imports mhc_compile.backend",
        "mhc_compile.ops.broken:3 imports mhc_compile.explain",
        "mhc_compile.ops.broken:4 imports mhc_compile.passes.shadow",
        "mhc_compile.ops.broken:5 imports passes.shadow; it is mhc_compile.passes.shadow",
    ]


def public_definitions(path: Path) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef]]:
    """Modules, and the public classes and functions of public modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    private_module = any(part.startswith("_") and part != "__init__" for part in module_name(path).split("."))
    yield module_name(path), tree
    if private_module:
        return
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            yield f"{module_name(path)}.{node.name}", node


def test_every_public_name_has_a_docstring() -> None:
    missing = [
        name for path in python_files() for name, node in public_definitions(path) if not ast.get_docstring(node)
    ]
    assert sorted(set(missing)) == []


def test_passes_is_a_relative_link() -> None:
    if not (ROOT / "passes").exists():
        pytest.skip("an sdist has the passes in place of the link")
    link = PACKAGE / "passes"
    assert link.is_symlink()
    assert link.readlink() == Path("../passes")


def project_files() -> list[Path]:
    """The files that git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout, so what belongs to the project is unknown")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def test_no_file_names_the_place_it_was_written_in() -> None:
    # Absolute folders of one machine; a word that merely contains one of the names is no path.
    place = re.compile(r"(?<![\w.$}~-])/(?:work|home|root|tmp|Users|mnt|opt)/")
    found = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
            for number, line in enumerate(text.splitlines(), 1)
            if place.search(line) and path != Path(__file__).resolve()
        ]
    assert found == []


# What begins with an underscore and is used by everybody all the same: how a backend registers, how a user starts anew,
# the type of an operator, trees and dispatch modes. All else that may change without notice is in compat.
PRIVATE = (
    "torch._dynamo",
    "torch._dynamo.list_backends",
    "torch._dynamo.register_backend",
    "torch._dynamo.reset",
    "torch._ops",
    "torch._ops.OpOverload",
    "torch.utils._python_dispatch.TorchDispatchMode",
)
PUBLIC = ("torch.ops", "torch.utils._pytree")


def private_names(path: Path) -> list[str]:
    """What a module uses of torch by a name with an underscore in front, but for the above."""
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    used = [(ast.unparse(node), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for name, line in [*used, *imported_names(path)]:
        private = re.match(r"torch\.(\w+\.)*_[a-z]\w*", name)
        if private is not None and name not in PRIVATE and not any(within(name, prefix) for prefix in PUBLIC):
            found.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    return found


def test_private_names_of_torch_stay_in_compat() -> None:
    outside = [path for path in python_files() if not within(module_name(path), "mhc_compile.compat")]
    assert [found for path in outside for found in private_names(path)] == []
    assert any(private_names(path) for path in python_files() if path not in outside)
