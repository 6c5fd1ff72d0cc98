"""Who imports whom, and what importing fastlayers costs; each in a fresh interpreter."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fastlayers

PACKAGE = Path(fastlayers.__file__).parent
PROJECTION = {"_projection", *(f"_projection_{part}" for part in ("blocks", "data", "factors", "search"))}
LAYERS = {"_linear_list", "_monarch_linear", *PROJECTION}
OPS = {"ops", "_monarch_ops", "_monarch_reference", "_reference", "_registration", "_extension"}


def modules() -> dict[str, Path]:
    """Every module below the package, by its dotted name without ``fastlayers.``."""
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported(name: str, path: Path) -> set[str]:
    """The package's modules that a module's source imports, wherever in the file."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = [] if node.level == 0 else package[: len(package) - (node.level - 1)]
            target = [*base, *(node.module.split(".") if node.module else [])]
            if node.level == 0:
                if target[:1] != ["fastlayers"]:
                    continue
                target = target[1:]
            found |= {".".join([*target, alias.name]) for alias in node.names}
        elif isinstance(node, ast.Import):
            dotted = [alias.name.split(".") for alias in node.names]
            found |= {".".join(d[1:]) for d in dotted if d[0] == "fastlayers"}
    return {".".join(d.split(".")[:1]) for d in found if d}


def forbidden(name: str, target: str) -> bool:
    """Tell whether ``name`` may not import ``target``: csrc <- _extension <- ops <- layers <- convert."""
    top = name.split(".")[0]
    if top in {"_extension", "_reference", "_monarch_reference", "_version"}:
        return target not in {"_version"}
    if top in OPS:
        return target not in OPS
    if top == "equivalence":
        return target != "equivalence"
    if top in LAYERS:
        return target not in OPS | LAYERS | {"_version"}
    if top == "convert":
        # verify is called late, and knows nothing of the converter
        verifies = name in {"convert._convert", "convert._monarch_convert"}
        return target == "cli" or (target == "equivalence" and not verifies)
    return False


def test_directions() -> None:
    for name, path in modules().items():
        if name and name != "_build":
            wrong = {target for target in imported(name, path) if forbidden(name, target)}
            assert not wrong, f"fastlayers.{name} imports {sorted(wrong)}"


@pytest.mark.parametrize(
    ("name", "target", "refused"),
    [
        ("ops", "_linear_list", True),
        ("_reference", "ops", True),
        ("_extension", "ops", True),
        ("equivalence._judge", "convert", True),
        ("_linear_list", "convert", True),
        ("_linear_list", "ops", False),
        ("convert._rules", "_linear_list", False),
    ],
)
def test_the_rule_itself(name: str, target: str, refused: bool) -> None:
    assert forbidden(name, target) is refused


def test_finds_relative_and_late_imports(tmp_path: Path) -> None:
    source = tmp_path / "m.py"
    source.write_text("from . import ops\nfrom .convert import x\ndef f():\n    import fastlayers.cli\n")
    assert imported("m", source) == {"ops", "convert", "cli"}


def fresh(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=120)


def test_import_is_light_and_starts_no_cuda() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import fastlayers
assert not torch.cuda.is_initialized()
heavy = {"torch_geometric", "pandas", "matplotlib", "sklearn", "rich", "scipy", "models", "torch._dynamo"}
print(sorted({m for m in sys.modules if m in heavy} - before))
"""
    result = fresh(code)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")
    result = fresh(code.replace("import fastlayers", "import pandas, fastlayers"))
    assert result.stdout.strip() == "['pandas']"


def test_equivalence_needs_torch_alone() -> None:
    result = fresh("import sys, fastlayers.equivalence; print('fastlayers.convert' in sys.modules)")
    assert result.returncode == 0, result.stderr
