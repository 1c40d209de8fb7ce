"""Each adapter on two processes gives what it gives on one, and goes on from a checkpoint in the middle of an
epoch; and what an import says without its library."""

import ast
import subprocess
import sys
from pathlib import Path

import integrations_script as script
import pytest
import torch

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def one(folder):
    return script.run(folder)


@pytest.fixture(scope="module")
def two(folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(HERE / "integrations_script.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.fail(done.stderr[-8000:])
    return [torch.load(folder / f"2-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", script.CASES)
@pytest.mark.filterwarnings("ignore")  # of the libraries
def test_two_processes_do_what_one_does(one, two, name):
    if name not in script.STREAMS:
        pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)
    assert one[name]["draws"] == 18
    p = one[name]["p"]
    assert p.max() > 1.5 * p.min()  # learned
    assert one[name]["resumed"]
    for rank in two:
        assert rank[name]["resumed"]
        torch.testing.assert_close(rank[name]["parameters"], one[name]["parameters"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rank[name]["p"], p, rtol=1e-3, atol=0)
        if name not in script.STREAMS:
            assert rank[name]["capped"] == one[name]["capped"] > 0
    assert torch.equal(two[0][name]["p"], two[1][name]["p"])
    if name in script.STREAMS:
        halves = [rank[name]["values"] for rank in two]
        assert len(set(halves[0] + halves[1])) == len(halves[0] + halves[1]) == 180
        readers = 2 if name == "streams" else 4  # two workers each
        assert {v % readers for v in halves[0]} == set(range(readers // 2))


def test_an_import_says_what_to_install():
    """In a process in which no optional library can be imported: the core does not miss them."""
    names = ["lightning", "transformers", "accelerate", "keras"]
    code = (
        "import sys\n"
        f"for name in {names}:\n    sys.modules[name] = None\n"
        "import adambs, importlib\n"
        f"for name in {names}:\n"
        "    try:\n"
        "        importlib.import_module(f'adambs.integrations.{name}')\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name, line in zip(names, done.stdout.splitlines(), strict=True):
        assert line.startswith(f"adambs.integrations.{name} needs {name}, which is not installed")
        assert f"pip install 'adambs[{name}]'" in line


@pytest.mark.parametrize("name", ["lightning", "transformers", "accelerate", "keras"])
def test_an_adapter_imports_no_library_but_its_own(name):
    path = HERE.parent / "src" / "adambs" / "integrations"
    for file in (path / f"{name}.py", path / "_common.py", path / "__init__.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        others = {module.split(".")[0] for module in found} - set(sys.stdlib_module_names)
        assert others <= {"adambs", "torch", name}


def test_keras_on_another_backend_is_told():
    code = (
        "import sys, types\n"
        "keras = sys.modules['keras'] = types.ModuleType('keras')\n"
        "keras.backend = types.SimpleNamespace(backend=lambda: 'tensorflow')\n"
        "try:\n    import adambs.integrations.keras\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "its backend is 'tensorflow': set the environment variable KERAS_BACKEND=torch" in done.stdout
