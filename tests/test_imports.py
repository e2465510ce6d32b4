"""What is not asked for is not loaded, and what is offered is there."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import polytempo

HEAVY = {
    *("torch", "numpy", "scipy", "sklearn", "pandas", "pydantic", "matplotlib", "PIL"),
    *("datasets", "ray", "zenoh", "cryptography", "safetensors", "grpc", "google.protobuf"),
    *("transformers", "peft", "tokenizers"),
    *("starlette", "uvicorn", "plotly", "tensorboard", "mlflow", "wandb", "optuna"),
}
HELP = """
import sys
from polytempo.cli import main
sys.argv = ["polytempo", {option!r}]
try:
    main()
except SystemExit as ended:
    assert not ended.code
"""


def loaded(program: str) -> set[str]:
    """The modules that a fresh interpreter holds after running the program."""
    last = "\nimport sys\nprint('\\n', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program + last], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "program",
    [
        "import polytempo",
        "import polytempo; dir(polytempo)",
        "import polytempo.core",
        HELP.format(option="--help"),
        HELP.format(option="--version"),
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(program):
    assert loaded(program) & HEAVY == set()


def test_the_core_does_not_load_the_house():
    core = (Path(polytempo.__file__).parent / "core").glob("*.py")
    found = loaded("\n".join(f"import polytempo.core.{path.stem}" for path in core))
    ours = {module for module in found if module.startswith("polytempo.")}
    assert "polytempo.core.server" in ours
    assert {module for module in ours if module.split(".")[1] != "core"} == set()


@pytest.mark.parametrize("package", ["simulation", "strategies", "experiments.run", "report"])
def test_what_few_runs_need_is_loaded_by_those(package):
    few = {"sklearn", "scipy", "matplotlib", "PIL", "datasets", "ray", "zenoh", "cryptography"}
    few |= {"transformers", "peft", "tokenizers"}
    few |= {"grpc", "google.protobuf", "tensorboard", "mlflow", "wandb"}
    assert loaded(f"import polytempo.{package}") & few == set()


def test_every_name_of_the_package_is_there():
    for name in polytempo.__all__:
        assert name in dir(polytempo)
        found = getattr(polytempo, name)
        assert getattr(found, "__name__", name).rpartition(".")[2] == name
    everything = {}
    exec("from polytempo import *", everything)
    assert everything.keys() >= set(polytempo.__all__)
    with pytest.raises(AttributeError, match="'polytempo' has no attribute 'Federatoin'"):
        polytempo.Federatoin  # noqa: B018


def test_type_checkers_and_the_interpreter_see_the_same_names():
    tree = ast.parse(Path(polytempo.__file__).read_text(encoding="utf8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {alias.name for node in block.body for alias in node.names}
    assert seen == set(polytempo.__all__) == set(polytempo._HOME)


def test_all_strategies_are_known_however_they_are_reached():
    found = loaded("import polytempo; assert 'pace' in polytempo.STRATEGIES")
    assert "polytempo.strategies.pace" in found
