"""Imports go downwards only."""

import ast
from pathlib import Path

import polytempo

ROOT = Path(polytempo.__file__).parent
# What each package may import, besides itself. `polytempo/__init__.py` sees all.
ALLOWED = {
    "core": set(),
    "native": {"core"},
    "data": {"core", "files"},
    "models": {"core"},
    "training": {"core", "data", "models", "native"},
    "nodes": {"core"},
    "strategies": {"core", "nodes"},
    "simulation": {"core", "data", "models", "training", "strategies", "nodes", "storage"},
    "report": {"core", "files"},
    "view": {"core", "files", "report"},
    "experiments": {
        *("core", "data", "models", "training", "strategies", "simulation", "report", "storage"),
        *("network", "nodes", "files", "native"),
    },
    "network": {"core", "training", "nodes", "storage", "files"},
    "bench": {
        *("core", "data", "models", "training", "strategies", "simulation", "network", "nodes"),
        *("native", "storage", "files", "experiments"),
    },
    "cli": {
        *("core", "data", "models", "training", "nodes", "strategies", "simulation", "network"),
        *("report", "view", "experiments", "bench"),
    },
}
NO_IO = {"socket", "time", "threading", "random", "asyncio", "subprocess", "requests", "datetime"}


def imports(path: Path) -> set[str]:
    """Every absolute module that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            if node.module == "polytempo":
                found |= {f"polytempo.{alias.name}" for alias in node.names}
    return found


def test_every_package_has_its_place():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(ALLOWED)


def test_imports_go_downwards_only():
    wrong = []
    for package, allowed in ALLOWED.items():
        for path in (ROOT / package).rglob("*.py"):
            for module in imports(path):
                if not module.startswith("polytempo"):
                    continue
                layer = [*module.split("."), ""][1]
                if layer not in allowed | {package}:
                    wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_core_strategies_and_nodes_do_no_io_and_read_no_clock():
    wrong = []
    for package in ("core", "strategies", "nodes"):
        for path in (ROOT / package).rglob("*.py"):
            for module in imports(path):
                if module.split(".")[0] in NO_IO:
                    wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_strategies_and_nodes_draw_no_global_random_numbers():
    for package in ("core", "strategies", "nodes"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf8")
            for call in ("torch.rand", "torch.manual_seed", "np.random.rand", "np.random.seed"):
                assert call not in text, f"{path.name} uses {call}"
