"""``import attn_ops`` is fast, and imports torch alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BUDGET = 0.150
"""Seconds that the import may add to that of torch."""

MEASURE = """
import sys, time, json
import torch
before, start = set(sys.modules), time.process_time()
import attn_ops
spent = time.process_time() - start
print(json.dumps({"spent": spent, "modules": sorted(set(sys.modules) - before)}))
"""

MERGE = """
import attn_ops, torch
v, s = torch.ones(2, 1, 1, 8), torch.zeros(2, 1, 1)
out, lse = torch.ops.attn.merge_states(v, s)
assert torch.equal(out, v[:, 0]), out
print(attn_ops.explain("merge_states", v, s))
"""


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    return json.loads(_python(MEASURE))


def test_import_is_fast(imported: dict[str, Any]) -> None:
    """CPU time of the import without torch's. Load on the machine adds to it, so a slow import is measured again."""
    spent = [imported["spent"]]
    while spent[-1] >= BUDGET and len(spent) < 3:
        spent.append(json.loads(_python(MEASURE))["spent"])
    assert spent[-1] < BUDGET, spent


@pytest.mark.parametrize("module", ["triton", "torch._inductor", "torch._dynamo", "numpy", "attn_ops.kernels.triton"])
def test_import_leaves_out(imported: dict[str, Any], module: str) -> None:
    assert not [name for name in imported["modules"] if name == module or name.startswith(f"{module}.")]


BROKEN = "import sys; sys.path.insert(0, {0!r})\n"
PROGRAMS = {
    "not installed": "import sys; sys.modules['triton'] = None\n" + MERGE,
    "broken": BROKEN + MERGE,
    "broken, collect_env": BROKEN + "import attn_ops; print(attn_ops.collect_env().images)",
}
FORKS = """
import json, os, sys
import torch  # once for all programs
for name, program in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    if os.fork() == 0:
        sys.stdout = open(name, "w")
        exec(program, {})
        sys.stdout.close()
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.fixture(scope="module")
def without_triton(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines that each of the programs prints, in a process of its own."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "triton").mkdir()
    (folder / "triton" / "__init__.py").write_text("raise ImportError('libcuda.so.1 is missing')")
    programs = {str(folder / name): program.format(str(folder)) for name, program in PROGRAMS.items()}
    words = [sys.executable, "-c", FORKS, json.dumps(programs)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: (folder / name).read_text().splitlines() for name in PROGRAMS}


def test_works_where_triton_is_not_installed(without_triton: dict[str, list[str]]) -> None:
    assert "triton is not installed" in without_triton["not installed"][1]
    assert without_triton["not installed"][-1] == "reference: runs it"


def test_works_where_triton_is_broken(without_triton: dict[str, list[str]]) -> None:
    assert without_triton["broken"][-1] == "reference: runs it"


def test_collect_env_works_where_triton_is_broken(without_triton: dict[str, list[str]]) -> None:
    assert without_triton["broken, collect_env"] == ["none: triton cannot be imported (libcuda.so.1 is missing)"]


FOLDER = """
import kernels
import pickle
for use, raised, words in (
    ("kernels.get_kernel", AttributeError, "is attn_ops.kernels: import attn_ops"),
    ("from kernels import reference", ImportError, kernels.__file__),
    ("import kernels.reference", ModuleNotFoundError, "kernels.reference"),
):
    try:
        exec(use)
    except raised as error:
        assert words in str(error), error
    else:
        raise AssertionError(use)
assert not hasattr(kernels, "get_kernel")
function = lambda: None
function.__module__ = None  # of which pickle asks every module
try:
    pickle.dumps(function)
except pickle.PicklingError:
    pass
import attn_ops.kernels.reference
try:
    from transformers import LlamaForCausalLM
except ModuleNotFoundError as error:
    assert error.name == "transformers"
"""


def test_the_folder_kernels_of_a_checkout_is_no_package() -> None:
    """In the root it can be imported, as transformers does when it looks for a published package of that name."""
    done = subprocess.run([sys.executable, "-c", FOLDER], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
