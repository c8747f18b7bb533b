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


def test_works_where_triton_is_not_installed() -> None:
    lines = _python("import sys; sys.modules['triton'] = None\n" + MERGE).splitlines()
    assert "triton is not installed" in lines[1]
    assert lines[-1] == "reference: runs it"


def test_works_where_triton_is_broken(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('libcuda.so.1 is missing')")
    lines = _python(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + MERGE).splitlines()
    assert lines[-1] == "reference: runs it"


def test_collect_env_works_where_triton_is_broken(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('libcuda.so.1 is missing')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport attn_ops; print(attn_ops.collect_env().images)"
    assert _python(code).strip() == "none: triton cannot be imported (libcuda.so.1 is missing)"


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
