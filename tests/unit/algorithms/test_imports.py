"""algorithms/ depends on torch and the standard library alone; the reference loader leaves no trace."""

import ast
import pathlib
import sys

import megarl.algorithms
from tests.references import verl_core_algos

FOLDER = pathlib.Path(megarl.algorithms.__file__).parent


def imported_modules(path):
    """Every module that a file imports, at any depth, by its full name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative imports hide where they lead"
            yield node.module


def test_algorithms_import_torch_and_the_standard_library_alone():
    files = list(FOLDER.rglob("*.py"))
    assert len(files) >= 7
    for path in files:
        for name in imported_modules(path):
            is_own = name.startswith(("megarl.algorithms", "megarl.deferred"))
            top = name.split(".")[0]
            assert is_own or top == "torch" or top in sys.stdlib_module_names, f"{path.name} imports {name}"
            assert not name.startswith("torch.distributed"), f"{path.name}: collectives are the caller's"


def test_reference_loader_restores_the_modules():
    before = dict(sys.modules)
    verl_core_algos.load_verl.cache_clear()
    verl = verl_core_algos.load_verl()
    added = {name for name in sys.modules if name not in before}
    assert not {name for name in added if name.split(".")[0] in ("verl", "omegaconf", "tensordict", "transformers")}
    assert all(sys.modules[name] is module for name, module in before.items())
    assert verl.core_algos.compute_gae_advantage_return.__code__.co_filename.endswith("core_algos.py")
