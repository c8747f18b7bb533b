"""The C++ API on packages of ``export_package``: results, the words of Python's errors, and memory after a refusal."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import cpp_runner, oracle
from helpers.page_tables import indptr, int32, page_table
from torch import Tensor, nn
from torch.export import Dim
from tracing.conftest import Package

import attn_ops
from attn_ops import cpp, packaging
from attn_ops.distributed import ContextShard

HELPERS = Path(cpp_runner.__file__).parent
PAGES, PAGE, QO_HEADS, KV_HEADS, DIM = 24, 4, 4, 2, 16
UNDEFINED, SPARSE = torch.tensor(torch.nan), torch.tensor(torch.inf)
"""What stands for such tensors in a case: C++ cannot read them from a file of ``torch.save``."""


class Result(NamedTuple):
    """A case in the C++ process: ``ok`` or class and message, then its tensors afterwards."""

    message: str
    state: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


Case = tuple[Sequence[Tensor], Sequence[Tensor]]


def _run(package: str, cases: Sequence[Case], folder: Path, *planner: str) -> list[Result]:
    torch.save([[list(table), list(inputs)] for table, inputs in cases], folder / "cases.pt")
    program = cpp_runner.program("calls", *cpp_runner.sanitizer())
    words = [*program, package, str(folder / "cases.pt"), str(folder / "results.pt"), *planner]
    done = subprocess.run(words, env=cpp_runner.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    messages = done.stdout.splitlines()
    return [Result(m, *r) for m, r in zip(messages, torch.load(folder / "results.pt"), strict=True)]


def _python(call: Callable[..., Any], *args: Any) -> str:
    try:
        call(*args)
    except attn_ops.errors.AttnOpsError as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


class Decode(nn.Module):
    def forward(self, q: Tensor, cache: Tensor, plan: attn_ops.DecodePlan, workspace: Tensor) -> Any:
        return torch.ops.attn.batch_decode(q, cache[:, 0], cache[:, 1], plan, workspace, return_lse=True)


class Prefill(nn.Module):
    def forward(self, q: Tensor, cache: Tensor, plan: attn_ops.PrefillPlan, workspace: Tensor) -> Any:
        return torch.ops.attn.batch_prefill(q, cache[:, 0], cache[:, 1], plan, workspace, causal=True, return_lse=True)


def _with_metadata(package: str, path: Path, change: Callable[[dict[str, str]], None]) -> str:
    """A copy of a package with other metadata in both of its models."""
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(path, "w") as new:
        for member in old.infolist():
            content = old.read(member)
            if member.filename.endswith("_metadata.json"):
                metadata = json.loads(content)
                change(metadata)
                content = json.dumps(metadata).encode()
            new.writestr(member.filename, content)
    return str(path)


def _with_larger_plan(package: str, path: Path) -> str:
    """A copy of a package whose metadata gives ``plan.kv_indices`` an element more."""
    name = "attn_ops.field.kv_indices"
    return _with_metadata(package, path, lambda metadata: metadata.update({name: str(int(metadata[name]) + 1)}))


SIZES = {"page_size": PAGE, "num_qo_heads": QO_HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}


def _cache() -> Tensor:
    return torch.randn(PAGES, 2, PAGE, KV_HEADS, DIM, generator=torch.Generator().manual_seed(1))


def _q(rows: int) -> Tensor:
    return torch.randn(rows, QO_HEADS, DIM, generator=torch.Generator().manual_seed(rows))


def _expected(
    q: Tensor, cache: Tensor, table: Sequence[Tensor], rows: Sequence[int], causal: bool
) -> tuple[Tensor, Tensor]:
    """The oracle's result of a batch."""
    kv_indptr, kv_indices, last = table
    results = []
    for b, request in enumerate(q.split(list(rows))):
        pages = cache[kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()]
        length = max(len(pages) - 1, 0) * PAGE + (int(last[b]) if len(pages) else 0)
        k, v = (pages[:, i].flatten(0, 1)[:length] for i in (0, 1))
        results.append(oracle.attention(request, k, v, causal=causal))
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def _assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, attn_ops.DecodePlanner]:
    """A package and its planner."""
    planner = attn_ops.DecodePlanner(4, 16, **SIZES, max_kv_len=40, num_ctas=3, cache_pages=PAGES)
    inputs = (_q(3), _cache(), planner.state, planner.workspace)
    path = tmp_path_factory.mktemp("decode") / "decode.pt2"
    shapes = {"q": {0: Dim("batch", min=1, max=4)}}
    return attn_ops.export_package(Decode(), planner, inputs, path, dynamic_shapes=shapes), planner


@pytest.mark.slow
def test_decode(decode: tuple[str, attn_ops.DecodePlanner], prefill_package: Package, tmp_path: Path) -> None:
    package, planner = decode
    good = page_table([7, 0, 20], PAGE)
    kv_indptr, kv_indices, last = good
    q, cache = _q(3), _cache()
    tables = {
        "another batch": page_table([1, 40, 3, 9], PAGE),
        "one request": page_table([13], PAGE),
        "int64": [t.long() for t in good],
        "starts above 0": (kv_indptr + 1, kv_indices, last),
        "falls": (int32([0, 3, 2, 7]), kv_indices, last),
        "an indptr of 2 dimensions": (kv_indptr[None], kv_indices, last),
        "page numbers of 2 dimensions": (kv_indptr, kv_indices[None], last),
        "last lengths of 2 dimensions": (kv_indptr, kv_indices, last[None]),
        "no indptr": (int32([]), kv_indices, last),
        "too few last lengths": (kv_indptr, kv_indices, last[:2]),
        "last length 0": (kv_indptr, kv_indices, int32([0, 0, 4])),
        "last length above the page": (kv_indptr, kv_indices, int32([3, 0, 5])),
        "too few page numbers": (kv_indptr, kv_indices[:-1], last),
        "negative page": (kv_indptr, kv_indices - 7, last),
        "page beyond the cache": (kv_indptr, kv_indices + PAGES, last),
        "too many requests": page_table([1, 2, 3, 4, 5], PAGE),
        "too many pages": page_table([40, 30], PAGE),
        "too long a request": page_table([41], PAGE),
        "unused page numbers": (kv_indptr, torch.cat([kv_indices, int32([0] * 10)]), last),
        "floats": (kv_indptr.float(), kv_indices, last),
        "sparse": (kv_indptr, SPARSE, last),
        "good": good,
    }
    cases: list[Case] = [(good, [q, cache]), *((table, []) for table in tables.values())]
    results = _run(package, cases, tmp_path)
    assert results[0].message == "ok"
    _assert_equal(results[0].outputs, _expected(q, cache, good, [1] * 3, causal=False))
    before = results[0]
    planner.plan(*good)
    for (name, table), result in zip(tables.items(), results[1:], strict=True):
        given = (kv_indices.to_sparse() if t is SPARSE else t for t in table)
        said = _python(planner.plan, *given).replace("DecodePlanner.plan", "plan")
        assert result.message == said, name
        right = ("another batch", "one request", "int64", "unused page numbers", "good")
        assert (said == "ok") == (name in right), said
        expected = before.state
        if said == "ok":
            expected = (*planner.plan(*table), before.state[-1])
        for one, other in zip(result.state, expected, strict=True):
            assert torch.equal(one, other), name
        before = result

    strided = cache.transpose(0, 1).contiguous().transpose(0, 1)
    bad = {
        "too few": ([q], "ArgumentError: run: there are 1 inputs; expected 2: q, cache; pass the tensors of forward"),
        "undefined": ([q, UNDEFINED], "ArgumentError: run: cache is undefined; expected a tensor; pass a tensor"),
        "sparse": ([q, SPARSE], "ArgumentError: run: cache is sparse_coo; expected a strided tensor; pass"),
        "dtype": ([q.half(), cache], "DTypeError: run: q is float16; expected float32; convert it"),
        "rank": ([q[0], cache], "ShapeError: run: q is [4, 16]; expected [?, 4, 16]; pass tensors like the exported"),
        "size": ([q, cache[:-1]], "ShapeError: run: cache is [23, 2, 4, 2, 16]; expected [24, 2, 4, 2, 16]; pass"),
        "strides": ([q, strided], "ShapeError: run: cache has strides [128, 3072, 32, 16, 1]; expected [256, 128, 32,"),
        "rows": (
            [_q(5), cache],
            "q has 5 rows and the plan capacity for 4 requests; expected max_batch of at least 5;",
        ),
    }
    results = _run(package, [(good, [q, cache]), *(([], inputs) for inputs, _ in bad.values())], tmp_path)
    for (name, (given, message)), result in zip(bad.items(), results[1:], strict=True):
        if name == "rows":
            assert message in result.message or torch.__version__ < "2.13"  # before, the loader prints the message
            assert result.message.startswith("CapacityError: ") or torch.__version__ < "2.13"
        else:
            assert result.message.startswith(message)
        for one, other in zip(result.state, results[0].state, strict=True):
            assert torch.equal(one, other), name
        for one, other in zip(result.inputs, given, strict=True):
            assert other is UNDEFINED or other is SPARSE or torch.equal(one, other), name
        assert not result.outputs

    larger = _with_larger_plan(package, tmp_path / "more.pt2")
    others = {
        larger: "plan.kv_indices is [17]; expected [16]; pass the planner of this package",
        prefill_package.path: "the plan is a PrefillPlan; expected a DecodePlan; pass the planner",
    }
    for other_package, message in others.items():
        (result,) = _run(package, [([], [q, cache])], tmp_path, other_package)
        assert result.message.startswith(f"PlanError: run: {message}")
        assert not any(t.any() for t in result.state)


class Biased(nn.Module):
    """The tensors of a decode step after the plan, in a dictionary."""

    def forward(self, plan: attn_ops.DecodePlan, workspace: Tensor, x: dict[str, Tensor], cache: Tensor) -> Any:
        q, (k_cache, v_cache) = x["q"] + x["bias"], cache.unbind(1)
        return torch.ops.attn.batch_decode(q, k_cache, v_cache, plan, workspace, return_lse=True)


@pytest.mark.slow
def test_a_plan_of_one_page_and_sizes_that_disagree(tmp_path: Path) -> None:
    """A batch may have no page: that one is a fixed size of the package. Errors of dynamic sizes name the tensor."""
    planner = attn_ops.DecodePlanner(3, 1, **SIZES, cache_pages=PAGES)
    batch, cache = Dim("batch", min=1, max=3), _cache()
    inputs = (planner.state, planner.workspace, {"q": _q(2), "bias": _q(3)[:2]}, cache)
    path, shapes = tmp_path / "biased.pt2", {"x": {"q": {0: batch}, "bias": {0: batch}}}
    package = attn_ops.export_package(Biased(), planner, inputs, path, dynamic_shapes=shapes)
    tables = {
        "one page": page_table([3, 0], PAGE),
        "none": page_table([0, 0], PAGE),
        "none, and a page number": (int32([0, 0, 0]), int32([5]), int32([0, 0])),
        "two pages": page_table([3, 1], PAGE),
        "no page number": (int32([0, 1, 1]), int32([]), int32([3, 0])),
    }
    q, bias = _q(2), _q(3)
    results = _run(
        package, [*((table, [q, bias[:2], cache]) for table in tables.values()), ([], [q, bias, cache])], tmp_path
    )
    for (name, table), result in zip(tables.items(), results, strict=False):
        assert result.message == _python(planner.plan, *table), name
        if result.message == "ok":
            assert all(map(torch.equal, result.state, planner.state)), name
            _assert_equal(result.outputs, _expected(q + bias[:2], cache, table, [1] * 2, causal=False))
    assert [result.message == "ok" for result in results] == [True, True, True, False, False, False]
    fix = "pass tensors like the exported ones, or export the program for these sizes"
    if torch.__version__ >= "2.13":  # before, the loader prints the message
        assert results[-1].message == f"ShapeError: run: size 0 of x['bias'] is 3; expected 2; {fix}"


MISALIGNED = (
    "run: cache starts 4 bytes after a multiple of 16 bytes; expected an address that is a multiple of 16 bytes, since "
    "the step writes the tensor; allocate it on its own, or as a view that starts at such an address"
)


def test_a_misaligned_tensor_that_a_step_on_a_gpu_writes_is_refused() -> None:
    """Inductor's code would write to a copy of it. Tensors on the CPU stand for those on a GPU in these checks."""
    program = cpp_runner.program("alignment", *cpp_runner.sanitizer())
    done = subprocess.run(program, env=cpp_runner.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = ["ok", MISALIGNED, "ok", "ok"]
    assert done.stdout.splitlines() == [*written, *["ok"] * 8]


def test_an_assertion_of_torch_has_no_backtrace() -> None:
    program = cpp_runner.program("message", *cpp_runner.sanitizer())
    done = subprocess.run(program, env=cpp_runner.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "index out of bounds\n" * 2


@pytest.mark.slow
def test_zeros_for_an_argument(decode: tuple[str, attn_ops.DecodePlanner], tmp_path: Path) -> None:
    """A tensor, a list or a NamedTuple of them, as ``export_package`` names what an argument has."""
    dynamic = "ShapeError: zeros: q is [?, 4, 16]; expected fixed sizes; allocate it for each batch\n"
    for name in ("cache", "cache[0]", "cache['k']", "cache.k", "cache[0].k", "cached"):

        def rename(metadata: dict[str, str], name: str = name) -> None:
            if "attn_ops.input.1" in metadata:
                metadata["attn_ops.input.1"] = metadata["attn_ops.input.1"].replace(" cache ", f" {name} ")

        renamed = _with_metadata(decode[0], tmp_path / "renamed.pt2", rename)
        words = [*cpp_runner.program("zeros", *cpp_runner.sanitizer()), renamed, "cache", "q", "none"]
        done = subprocess.run(words, env=cpp_runner.environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        unknown = [
            f"ArgumentError: zeros: no input is {n}; expected q, {name}; correct the name\n" for n in ("cache", "none")
        ]
        found = "[24, 2, 4, 2, 16] 0 \n" if name != "cached" else unknown[0]
        assert done.stdout == found + dynamic + unknown[1]


THREADS, CALLS = 4, 50


@pytest.mark.slow
def test_a_package_without_runners_is_refused(decode: tuple[str, attn_ops.DecodePlanner], tmp_path: Path) -> None:
    torch.save([], tmp_path / "cases.pt")
    words = [*cpp_runner.program("threads", *cpp_runner.sanitizer()), decode[0], str(tmp_path / "cases.pt"), "-"]
    done = subprocess.run([*words, "0", "1"], env=cpp_runner.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "OptionError: Package: num_runners is 0; expected at least 1; make it larger\n"


@pytest.mark.slow
@pytest.mark.parametrize("runners", [1, 2])
def test_threads_share_a_package(runners: int, decode: tuple[str, attn_ops.DecodePlanner], tmp_path: Path) -> None:
    """Each has the results of the oracle in every run, with a planner, a batch and a cache of its own."""
    lengths = [[7, 0, 20], [13], [1, 24, 3, 9], [4, 4]]
    cases: list[Case] = []
    for i, batch in enumerate(lengths):
        cache = torch.randn(PAGES, 2, PAGE, KV_HEADS, DIM, generator=torch.Generator().manual_seed(10 + i))
        cases.append((page_table(batch, PAGE), [_q(len(batch)) + i, cache]))
    torch.save([[list(table), inputs] for table, inputs in cases], tmp_path / "cases.pt")
    files = [decode[0], str(tmp_path / "cases.pt"), str(tmp_path / "results.pt")]
    words = [*cpp_runner.program("threads", *cpp_runner.sanitizer()), *files, str(runners), str(CALLS)]
    done = subprocess.run(words, env=cpp_runner.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results.pt")
    assert len(results) == THREADS
    for (table, (q, cache)), (differ, refused, *outputs) in zip(cases, results, strict=True):
        assert (int(differ), int(refused)) == (0, CALLS)
        _assert_equal(outputs, _expected(q, cache, table, [1] * len(q), causal=False))


@pytest.mark.slow
def test_prefill_with_a_fixed_split_size(prefill_package: Package, tmp_path: Path) -> None:
    package, planner, *_ = prefill_package

    def case(lengths: Sequence[int], rows: Sequence[int]) -> list[Tensor]:
        return [indptr(rows), *page_table(lengths, PAGE)]

    q, cache, good = _q(11), _cache(), case([9, 30, 0], [4, 7, 0])
    tables = {
        "two splits": case([120], [8]),
        "six splits": case([120, 100], [16, 8]),
        "eight splits": case([120, 100], [16, 16]),
        "narrowed by the window": case([300], [8]),
        "more rows than keys": case([70], [40]),
        "too many rows": case([9, 30], [21, 20]),
        "rows of another batch": [indptr([4, 7]), *good[1:]],
        "rows that fall": [int32([0, 4, 3, 11]), *good[1:]],
        "rows that start above 0": [good[0] + 1, *good[1:]],
        "no rows": good[1:],
    }
    caches = [t.contiguous() for t in cache.unbind(1)]
    cases: list[Case] = [(good, [*caches, q]), *((table, []) for table in tables.values())]
    results = _run(package, cases, tmp_path)
    assert results[0].message == "ok"
    _assert_equal(results[0].outputs, _expected(q, cache, good[1:], [4, 7, 0], causal=True))
    said = {name: _python(planner.plan, *table) for name, table in tables.items() if name != "no rows"}
    planner.state.kv_indices.zero_()
    planner.plan(*good)
    assert {text.split(":")[0] for text in said.values()} == {"ok", "CapacityError", "ShapeError", "PageTableError"}
    assert "the batch makes 8 splits of 64 tokens and the plan capacity for 6" in said["eight splits"]
    said["no rows"] = (
        "ArgumentError: plan: qo_indptr is missing; expected qo_indptr, since this is a prefill plan; "
        "pass it before the page table"
    )
    before = results[0]
    for (name, table), result in zip(tables.items(), results[1:], strict=True):
        assert result.message == said[name], name
        expected = before.state
        if said[name] == "ok":
            expected = (*planner.plan(*table), before.state[-1])
        for one, other in zip(result.state, expected, strict=True):
            assert torch.equal(one, other), name
        before = result


@pytest.mark.slow
def test_a_rank_checks_its_own_pages_and_splits(
    decode: tuple[str, attn_ops.DecodePlanner], prefill_package: Package, tmp_path: Path
) -> None:
    """As the planner in Python. Checks read the metadata alone: here that of a rank, for a graph of all tokens."""
    shard = ContextShard(rank=1, world=2, interleave=2 * PAGE)

    def of_rank(package: str, name: str) -> str:
        problem = "attn_ops.problem"

        def change(metadata: dict[str, str]) -> None:
            metadata[problem] = metadata[problem].replace("rank=0 world=1 interleave=0", "rank=1 world=2 interleave=8")

        return _with_metadata(package, tmp_path / name, change)

    pages = attn_ops.DecodePlanner(4, 16, **SIZES, max_kv_len=40, cache_pages=PAGES, context=shard)
    kv_indptr, kv_indices, last = page_table([15, 20], PAGE)
    wrong = {"another rank's": 0, "the first": 2, "the last": 7}
    tables = {name: (kv_indptr, kv_indices.clone(), last) for name in wrong}
    for name, page in wrong.items():
        tables[name][1][page] = PAGES
    said = [_python(pages.plan, *table) for table in tables.values()]
    bad = "PageTableError: plan: kv_indices[{}] is 24; expected a page of the cache, 0 to 23; pass "
    assert said[0] == "ok"
    assert said[1].startswith(bad.format(2))
    assert said[2].startswith(bad.format(7))
    results = _run(decode[0], [(table, []) for table in tables.values()], tmp_path, of_rank(decode[0], "decode.pt2"))
    assert [result.message for result in results] == said

    options: dict[str, Any] = {"causal": True, "window_left": 100, "fixed_split_size": 16, "num_ctas": 6}
    sizes = {**SIZES, "max_kv_len": 300, "tile_rows": 8}
    splits = attn_ops.PrefillPlanner(3, 40, 80, **sizes, **options, context=shard)
    batches = [([120, 100], [16, 16]), ([300], [8]), ([300], [40]), ([250, 60], [20, 20]), ([70], [40])]
    tables = {str(batch): (indptr(batch[1]), *page_table(batch[0], PAGE)) for batch in batches}
    said = [_python(splits.plan, *table) for table in tables.values()]
    whole = [_python(prefill_package.planner.plan, *table) for table in tables.values()]
    assert said != whole, "a rank has fewer tokens, and so fewer splits"
    assert {text.split(":")[0] for text in said} == {"ok", "CapacityError"}
    package = of_rank(prefill_package.path, "prefill.pt2")
    results = _run(prefill_package.path, [(table, []) for table in tables.values()], tmp_path, package)
    assert [result.message for result in results] == said


class Ragged(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, plan: attn_ops.PrefillPlan, workspace: Tensor) -> Tensor:
        return torch.ops.attn.ragged_prefill(q, k, v, plan, workspace, window_right=24)[0]


@pytest.mark.slow
def test_ragged_prefill_of_one_request(tmp_path: Path) -> None:
    """A capacity for one request is a fixed size of the package. Splits are counted up to a window on the right.

    Tiles of 8 rows see 24 keys after their last: 64 keys of the tile at 32, and more than a split of those later.
    """
    sizes = {name: SIZES[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim")}
    planner = attn_ops.PrefillPlanner(
        1, 80, 0, **sizes, window_right=24, fixed_split_size=64, num_ctas=8, tile_rows=8, max_kv_len=80
    )
    tokens, rows = Dim("tokens", min=1, max=80), Dim("rows", min=1, max=80)
    k, v = (torch.randn(40, KV_HEADS, DIM, generator=torch.Generator().manual_seed(i)) for i in (2, 3))
    package = attn_ops.export_package(
        Ragged(),
        planner,
        (_q(4), k, v, planner.state, planner.workspace),
        tmp_path / "ragged.pt2",
        dynamic_shapes={"q": {0: rows}, "k": {0: tokens}, "v": {0: tokens}},
    )
    tables = {
        "good": [indptr([7]), indptr([21])],
        "too long": [indptr([7]), indptr([81])],
        "two requests": [indptr([3, 4]), indptr([20, 1])],
        "no split": [indptr([40]), indptr([40])],
        "eight splits": [indptr([70]), indptr([70])],
        "ten splits": [indptr([80]), indptr([80])],
    }
    said = {name: _python(planner.plan, *table) for name, table in tables.items()}
    assert [name for name, text in said.items() if text == "ok"] == ["good", "no split", "eight splits"]
    assert "the batch makes 10 splits of 64 tokens and the plan capacity for 8" in said["ten splits"]
    cases: list[Case] = [(table, []) for table in tables.values()]
    results = _run(package, [*cases, (tables["no split"], [_q(40), k, v])], tmp_path)
    before = [torch.zeros_like(t) for t in (*planner.state, planner.workspace)]
    for (name, table), result in zip(tables.items(), results, strict=False):
        assert result.message == said[name], name
        if result.message == "ok":
            before = [*planner.plan(*table), planner.workspace]
        for one, other in zip(result.state, before, strict=True):
            assert torch.equal(one, other), name
        before = list(result.state)
    expected, _ = oracle.attention(_q(40), k, v, window_right=24)
    torch.testing.assert_close(results[-1].outputs[0].double(), expected, rtol=1e-5, atol=1e-5)

    (result,) = _run(package, [(page_table([4], 1)[:1] * 2 + page_table([4], 1)[1:], [])], tmp_path)
    assert result.message.startswith("CapacityError: plan_prefill: the batch has 4 pages and the plan capacity for 0")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
def test_planning_on_a_gpu_does_not_wait_for_it(prefill: bool, tmp_path: Path) -> None:
    """Page tables on the host and on the GPU, and in a CUDA graph."""
    planner: Any
    if prefill:
        planner = attn_ops.PrefillPlanner(4, 40, 16, **SIZES, max_kv_len=40, cache_pages=PAGES, device="cuda")
        batches = (([4, 0, 7], [7, 0, 20]), ([1, 9, 2], [8, 12, 7]))
        tables = [[indptr(rows), *page_table(lengths, PAGE)] for rows, lengths in batches]
    else:
        planner = attn_ops.DecodePlanner(4, 16, **SIZES, max_kv_len=40, cache_pages=PAGES, device="cuda")
        tables = [page_table(lengths, PAGE) for lengths in ([7, 0, 20], [8, 12, 7], [40])]
    inputs = (_q(3).cuda(), _cache().cuda(), planner.state, planner.workspace)
    step = Prefill() if prefill else Decode()
    shapes = {"q": {0: Dim("rows", min=1, max=40 if prefill else 4)}}
    package = attn_ops.export_package(step, planner, inputs, tmp_path / "step.pt2", dynamic_shapes=shapes)

    torch.save([list(table) for table in tables], tmp_path / "tables.pt")
    program = cpp_runner.build(HELPERS / "cpp_device_plan.cpp", *cpp.cuda_flags())
    words = [str(program), package, str(tmp_path / "tables.pt"), str(tmp_path / "plans.pt")]
    done = subprocess.run(words, env=cpp_runner.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plans = torch.load(tmp_path / "plans.pt")

    def expected(table: Sequence[Tensor]) -> list[Tensor]:
        for field in planner.state:
            field.zero_()
        return [t.cpu().clone() for t in planner.plan(*(t.cuda() for t in table))]

    sizes = [t.shape for t in tables[0]]
    replayed = [table for table in tables if [t.shape for t in table] == sizes]
    assert len(replayed) > 1
    wanted = [*(table for table in tables for _ in range(2)), *replayed]
    for table, plan in zip(wanted, plans, strict=True):
        for name, one, other in zip(planner.state._fields, plan, expected(table), strict=True):
            assert torch.equal(one.flatten(), other.flatten()), name


PAGE_TABLE = """\
batch 6 | 0 0 0 0 | | 0 0 0
batch 3 | 0 2 2 3 | 0 1 2 | 3 0 4
batch 2 | 0 2 2 4 | 0 1 2 3 | 4 0 1
needs 0 0 1 0 1 1 2 1 3 2
CapacityError: append: request 1 needs 3 more pages and the cache has 2 free; expected a free page for every 4 tokens; \
release a request, or make the cache larger
{same}
CapacityError: append: request 1 needs 2305843009213693952 more pages and the cache has 2 free; \
expected a free page for every 4 tokens; release a request, or make the cache larger
{same}
OptionError: append: tokens is -1; expected 0 or more; release the request to shrink it
{same}
OptionError: needed: tokens is -1; expected 0 or more; release the request to shrink it
{same}
ArgumentError: append: there is no request 7; expected a request that add() returned; \
do not use a request after its release()
{same}
ArgumentError: release: there is no request 7; expected a request that add() returned; \
do not use a request after its release()
{same}
ArgumentError: batch: there is no request 7; expected a request that add() returned; \
do not use a request after its release()
{same}
OptionError: PageTable: cache_pages is 0; expected at least 1; make it larger
{same}
OptionError: PageTable: page_size is 2147483648; expected at most 2147483647; make it smaller
{same}
ArgumentError: length: there is no request 0; expected a request that add() returned; \
do not use a request after its release()
batch 4 | 0 2 2 | 2 3 | 1 0
batch 0 | 0 2 6 | 2 3 0 1 4 5 | 1 1
length 13 pages 4
""".format(same="batch 2 | 0 2 2 4 | 0 1 2 3 | 4 0 1")


@pytest.mark.skipif(not cpp_runner.find_package_works(), reason="needs CMake and a torch without CUDA")
def test_page_table_in_a_cmake_project(tmp_path: Path) -> None:
    """Growth, release and refusals, in a program that finds the headers by ``python -m attn_ops.cpp``."""
    command = [sys.executable, "-m", "attn_ops.cpp", "--cmake-prefix"]
    prefix = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(table CXX)\nfind_package(attn_ops 0.1 REQUIRED)\n"
        f'add_executable(table "{HELPERS / "cpp_page_table.cpp"}")\n'
        f"target_link_libraries(table PRIVATE attn_ops::attn_ops {' '.join(cpp_runner.sanitizer())})\n"
        f"target_compile_options(table PRIVATE {' '.join(cpp_runner.sanitizer())})\n"
    )
    for step in (["-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={prefix}"], ["--build", "build"]):
        done = subprocess.run(["cmake", *step], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    table = [str(tmp_path / "build/table")]
    done = subprocess.run(table, env=cpp_runner.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == PAGE_TABLE


@pytest.mark.slow
def test_a_file_that_is_no_package_of_export_package(tmp_path: Path) -> None:
    program = cpp_runner.program("calls", *cpp_runner.sanitizer())
    (tmp_path / "text.pt2").write_text("no archive")
    planner = attn_ops.DecodePlanner(2, 4, page_size=4, num_qo_heads=2, num_kv_heads=1, head_dim=16)
    whole = packaging._plan_metadata(planner)
    absent, text, *archives = (tmp_path / f"{name}.pt2" for name in ("absent", "text", "format", "number", "plain"))
    refused = [(absent, f"PackageError: package: cannot load {absent}: "), (text, f"cannot load {text}: ")]
    for path, metadata, message in (
        (archives[0], {**whole, "attn_ops.format": "9"}, "its metadata has format 9, these headers 2"),
        (archives[1], {**whole, "attn_ops.workspace": "-1"}, "its metadata has '-1' for a number"),
        (archives[2], {"AOTI_DEVICE_KEY": "cpu"}, "it has no metadata of attn_ops"),
    ):
        _archive(path, metadata)
        refused.append((path, f"PackageError: package: {path} cannot be used: {message}; expected a package that "))
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() == "x86_64" and "AVX512" not in capability:
        cpu = _archive(tmp_path / "cpu.pt2", {**whole, "AOTI_CPU_ISA": "AVX512"})
        refused.append((cpu, f"PackageError: package: {cpu} is compiled for a CPU with AVX512; expected "))
    if not torch.cuda.is_available():
        gpu = _archive(tmp_path / "gpu.pt2", {**whole, "attn_ops.device": "cuda"})
        refused.append((gpu, "DeviceError: Planner: there is no device of type cuda: "))
    other = _archive(tmp_path / "other.pt2", whole, model="step")
    refused.append((other, "metadata for model 'plan' in the zip archive.; expected a package that "))
    for path, message in refused:
        words = [*program, str(path), "cases.pt", "results.pt"]
        done = subprocess.run(words, env=cpp_runner.environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert message in done.stderr


def _archive(path: Path, metadata: dict[str, str], model: str = "plan") -> Path:
    """A package without code: it is refused before its code would be loaded."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/archive_format", "pt2")
        archive.writestr(f"package/data/aotinductor/{model}/x.wrapper_metadata.json", json.dumps(metadata))
        archive.writestr(f"package/data/aotinductor/{model}/x.wrapper.so", b"")
    return path


def test_the_folders_exist(capsys: pytest.CaptureFixture[str]) -> None:
    cpp.main(["--include"])
    assert (Path(capsys.readouterr().out.strip()) / "attn_ops/attn_ops.h").is_file()
    ours, of_torch = cpp.cmake_prefix().split(";")
    assert (Path(ours) / "share/cmake/attn_ops/attn_ops-config.cmake").is_file()
    assert (Path(of_torch) / "share/cmake/Torch/TorchConfig.cmake").is_file()
