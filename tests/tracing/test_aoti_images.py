"""Packages with images: decode, prefill and MLA on a Hopper GPU, from Python and in a C++ process.

Each package is compared with the eager op, bit for bit, and the eager op with the oracle: on threads that have not used
CUDA before, in a CUDA graph with other lengths, and with inputs that it must refuse.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import cpp_runner
from helpers.oracle import Expected
from helpers.page_tables import indptr, page_table
from torch import Tensor, nn

import attn_ops
from attn_ops.flash_attn import flash_attn_func

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MAX_BATCH, MAX_ROWS, MAX_PAGES, CACHE_PAGES = 4, 600, 160, 170

LENGTHS = ((700, 40, 0, 260), (9, 1300, 2, 64), (300, 1, 90))
"""Of the KV of the requests of each case. The first two differ in nothing else, the last has one request less."""

QUERY_LENGTHS = ((200, 40, 0, 61), (9, 200, 2, 90), (100, 1, 69))
"""Of the query rows in prefill. The other ops have one row for each request."""


class Kind(NamedTuple):
    """An op, the kernels that its package must have, and its problem."""

    op: str
    kernels: tuple[str, ...]
    heads: tuple[int, int]
    dims: tuple[int, int]  # of keys and values
    page_size: int
    options: dict[str, Any]
    kv_dtype: torch.dtype = torch.bfloat16


KINDS = {
    "decode": Kind("batch_decode", ("decode", "combine_decode_kernel"), (32, 8), (128, 128), 16, {}),
    "prefill": Kind(
        "batch_prefill",
        ("prefill", "combine_prefill_kernel"),
        (8, 2),
        (128, 128),
        16,
        {"causal": True},
    ),
    "decode, heads of 64": Kind("batch_decode", ("decode", "combine_decode_kernel"), (64, 8), (64, 64), 16, {}),
    "mla": Kind("batch_mla", ("mla", "combine_prefill_kernel"), (128, 1), (576, 512), 64, {}),
    "mla by tokens": Kind("batch_mla", ("mla", "combine_prefill_kernel"), (64, 1), (576, 512), 16, {}),
}


class Attend(nn.Module):
    """One call of an op, ``forward(*tensors, plan, workspace)``."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.op, self.options = getattr(torch.ops.attn, kind.op), kind.options

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        return self.op(*inputs, return_lse=True, **self.options)


class Call(NamedTuple):
    """The inputs of a case, its plan a copy, and its requests for the oracle."""

    tensors: tuple[Tensor, ...]
    plan: Any
    workspace: Tensor
    requests: list[tuple[Tensor, Tensor, Tensor]]

    @property
    def flat(self) -> list[Tensor]:
        return [*self.tensors, *self.plan, self.workspace]


class Built(NamedTuple):
    """A package and what makes its inputs."""

    kind: Kind
    path: str
    planner: Any
    calls: list[Call]
    expected: list[tuple[Tensor, ...]]


def _planner(kind: Kind) -> Any:
    sizes: dict[str, Any] = {"page_size": kind.page_size, "num_qo_heads": kind.heads[0], "num_kv_heads": kind.heads[1]}
    sizes |= {"head_dim": kind.dims[0], "head_dim_vo": kind.dims[1], "device": "cuda", "max_kv_len": 2048}
    if kind.op == "batch_decode":
        return attn_ops.DecodePlanner(MAX_BATCH, MAX_PAGES, **sizes)
    rows = MAX_BATCH if kind.op == "batch_mla" else MAX_ROWS
    return attn_ops.PrefillPlanner(MAX_BATCH, rows, MAX_PAGES, num_ctas=60, **sizes, **kind.options)


def _call(built_planner: Any, kind: Kind, case: int) -> Call:
    generator = torch.Generator().manual_seed(case)
    kv_lens = LENGTHS[case]
    qo_lens = QUERY_LENGTHS[case] if kind.op == "batch_prefill" else (1,) * len(kv_lens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    table = page_table(kv_lens, kind.page_size)
    key_dim, value_dim = kind.dims
    latent = kind.op == "batch_mla"
    width = key_dim if latent else key_dim + value_dim
    tokens = [random(n, kind.heads[1], width).to(kind.kv_dtype).bfloat16() for n in kv_lens]
    cache = torch.full((CACHE_PAGES, kind.page_size, kind.heads[1], width), math.nan, dtype=torch.bfloat16)
    for b, request in enumerate(tokens):
        pages = table[1][table[0][b] : table[0][b + 1]].long()
        padded = torch.full((len(pages) * kind.page_size, *request.shape[1:]), math.nan, dtype=torch.bfloat16)
        padded[: len(request)] = request
        cache[pages] = padded.view(len(pages), *cache.shape[1:])
    q = random(sum(qo_lens), kind.heads[0], key_dim)
    requests = [
        (rows, t[..., :key_dim], t[..., :value_dim] if latent else t[..., key_dim:])
        for rows, t in zip(q.split(qo_lens), tokens, strict=True)
    ]
    if latent:
        tensors = (*q.split((512, 64), -1), *cache[:, :, 0].to(kind.kv_dtype).split((512, 64), -1))
    else:
        tensors = (q, *cache.to(kind.kv_dtype).split(kind.dims, -1))
    on_gpu = tuple(t.contiguous().cuda() for t in tensors)
    arguments = [t.cuda() for t in (table if kind.op == "batch_decode" else (indptr(qo_lens), *table))]
    plan = built_planner.plan(*arguments)
    copied = type(plan)(*(t.clone() for t in plan))
    return Call(on_gpu, copied, torch.zeros_like(built_planner.workspace), requests)


def _captured(model: Attend, x: Call) -> tuple[Tensor, ...]:
    """The result of the eager op in a CUDA graph."""
    inputs = (*x.tensors, x.plan, x.workspace)
    model(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = model(*inputs)
    graph.replay()
    torch.cuda.synchronize()
    return tuple(t.cpu() for t in result)


def _expected(kind: Kind, model: Attend, calls: list[Call]) -> list[tuple[Tensor, ...]]:
    """Of the eager op, which the oracle agrees with."""
    results = []
    for x in calls:
        options = dict(kind.options)
        if kind.op == "batch_mla":
            options["sm_scale"] = 1 / math.sqrt(128 + 64)
        expected = Expected.of(x.requests, **options)
        eager = model(*x.tensors, x.plan, x.workspace)
        expected.check(*eager)
        results.append(_captured(model, x))
        expected.check(*results[-1])
        if kind.op != "batch_decode":  # eager decode combines in its last CTA, in another order
            assert all(torch.equal(a, b.cpu()) for a, b in zip(results[-1], eager, strict=True))
    return results


def _build(kind: Kind, folder: Path) -> Built:
    planner, model = _planner(kind), Attend(kind)
    calls = [_call(planner, kind, case) for case in range(len(LENGTHS))]
    x = calls[0]
    rows = torch.export.Dim("rows", min=1, max=MAX_BATCH if kind.op != "batch_prefill" else MAX_ROWS)
    queries = 2 if kind.op == "batch_mla" else 1
    fixed: tuple[Any, ...] = tuple({} for _ in x.tensors[queries:])
    shapes = (({0: rows},) * queries + (*fixed, type(x.plan)(*({} for _ in x.plan)), {}),)
    program = torch.export.export(model, (*x.tensors, x.plan, x.workspace), dynamic_shapes=shapes)
    path, quickly = str(folder / "attend.pt2"), {"aot_inductor.compile_wrapper_opt_level": "O0"}
    package = torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=quickly)
    return Built(kind, package, planner, calls, _expected(kind, model, calls))


@pytest.fixture(scope="module", params=KINDS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return _build(KINDS[request.param], tmp_path_factory.mktemp(request.param))


def _assert_equal(expected: list[tuple[Tensor, ...]], actual: list[Tensor], what: str) -> None:
    for i, results in enumerate(expected):
        for name, want, got in zip(("out", "lse"), results, actual[2 * i : 2 * i + 2], strict=True):
            assert torch.equal(want, got), f"{what}: {name} of case {i}"


def _has_image(package: str, kernel: str) -> bool:
    name = re.compile(rb"(?<!\w)%s_[0-9a-f]{8}" % kernel.encode())  # not prefill_ of combine_prefill_kernel
    with zipfile.ZipFile(package) as archive:
        return any(name.search(archive.read(file)) for file in archive.namelist() if file.endswith(".so"))


def test_the_package_contains_the_images(built: Built) -> None:
    for kernel in built.kind.kernels:
        assert _has_image(built.path, kernel), kernel


def test_in_cpp_on_new_threads_and_in_a_graph(built: Built, tmp_path: Path) -> None:
    calls, expected = built.calls, built.expected
    _, results = cpp_runner.run_cases(built.path, [x.flat for x in calls], tmp_path)
    outputs = 2 * len(calls)
    assert len(results) == 2 * outputs + 2 * 2
    _assert_equal(expected, list(results[:outputs]), "on a new thread")
    _assert_equal(expected, list(results[outputs : 2 * outputs]), "on the main thread")
    _assert_equal(expected[:2], list(results[2 * outputs :]), "replay")


PYTHON = """
import sys, threading, torch
package, inputs, outputs = sys.argv[1:]
loaded, results = torch._inductor.aoti_load_package(package), []
calls = torch.load(inputs)
def run_all():
    for inputs in calls:
        results.extend(t.cpu() for t in loaded.loader.run(inputs))
thread = threading.Thread(target=run_all)
thread.start(); thread.join()
run_all()
torch.save(results, outputs)
"""


def test_in_python(built: Built, tmp_path: Path) -> None:
    calls, expected = built.calls, built.expected
    torch.save([x.flat for x in calls], tmp_path / "inputs.pt")
    arguments = [built.path, str(tmp_path / "inputs.pt"), str(tmp_path / "outputs.pt")]
    done = subprocess.run(
        [sys.executable, "-c", PYTHON, *arguments],
        env=cpp_runner.preload(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "outputs.pt")
    _assert_equal([*expected, *expected], results, "in Python")


@pytest.mark.parametrize("name", ["prefill", "mla"])
def test_fp8_keys_and_values_are_read_by_the_kernel_of_eager_calls(name: str, tmp_path: Path) -> None:
    """``auto`` takes the same one in the package."""
    built = _build(KINDS[name]._replace(kv_dtype=torch.float8_e4m3fn), tmp_path)
    test_the_package_contains_the_images(built)
    test_in_python(built, tmp_path)


class Masked(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.attn.single_prefill(q, k, v, mask=mask, return_lse=True)


def test_a_custom_mask_is_read_by_the_kernel_of_eager_calls(tmp_path: Path) -> None:
    """At any address: a mask is not copied to an aligned one.

    A package for any number of rows has the largest query tile. Eager calls of fewer rows than here have a smaller one,
    whose sums have another order.
    """
    generator, keys = torch.Generator("cuda").manual_seed(0), 512
    calls = []
    for rows in (200, 71, 90):
        q, k, v = (
            torch.randn(n, h, 128, generator=generator, device="cuda").bfloat16()
            for n, h in ((rows, 8), (keys, 2), (keys, 2))
        )
        mask = torch.randint(0, 256, (rows * keys // 8,), generator=generator, device="cuda", dtype=torch.uint8)
        calls.append([q, k, v, mask])
    rows = torch.export.Dim("rows", min=1, max=1000)
    shapes = ({0: rows}, {}, {}, {0: 64 * rows})
    program = torch.export.export(Masked(), tuple(calls[0]), dynamic_shapes=shapes)
    quickly = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "masked.pt2"), inductor_configs=quickly
    )
    assert _has_image(package, "prefill")
    expected = [tuple(t.cpu() for t in Masked()(*call)) for call in calls]
    _, results = cpp_runner.run_cases(package, calls, tmp_path)
    _assert_equal(expected, list(results[: 2 * len(calls)]), "on a new thread")


class EqualLengths(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(q, k, v, causal=True)
        return out


EQUAL_LENGTHS = {
    "prefill": (
        *((3, 200, 512), (17, 90, 130), (1, 1, 1), (1, 700, 700), (0, 3, 4), (2, 0, 4)),
        *((1, 1, 4096), (2, 3, 3001), (1, 130, 1025), (5, 1, 1100)),
    ),
    "decode": ((3, 1, 512), (17, 1, 130), (1, 1, 1), (0, 1, 4), (2, 1, 0), (1, 1, 4096), (5, 1, 1101), (300, 1, 40)),
}
"""Kernel -> requests, rows and keys of each. Few rows of many keys are split. Decode takes one row."""


@pytest.mark.parametrize("kernel", EQUAL_LENGTHS)
def test_a_batch_of_equal_lengths_is_planned_in_no_package(kernel: str, tmp_path: Path) -> None:
    """Of any number of requests, rows and keys, from none on."""
    generator = torch.Generator("cuda").manual_seed(0)
    calls = []
    for batch, rows, keys in EQUAL_LENGTHS[kernel]:
        sizes = ((batch, rows, 8), (batch, keys, 2), (batch, keys, 2))
        calls.append([torch.randn(*size, 128, generator=generator, device="cuda").bfloat16() for size in sizes])
    batch, rows, keys = (torch.export.Dim(name, max=5000) for name in ("batch", "rows", "keys"))
    queries = {0: batch, 1: rows} if kernel == "prefill" else {0: batch}
    shapes = (queries, {0: batch, 1: keys}, {0: batch, 1: keys})
    program = torch.export.export(EqualLengths(), tuple(calls[0]), dynamic_shapes=shapes)
    assert "plan_prefill" not in str(program.graph)
    quickly = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "equal.pt2"), inductor_configs=quickly
    )
    assert _has_image(package, kernel)
    _, results = cpp_runner.run_cases(package, calls, tmp_path)
    for call, got in zip(calls, results, strict=False):
        for request, out in zip(zip(*(t.cpu() for t in call), strict=True), got, strict=True):
            Expected.of([request], causal=True).check(out)


def _misaligned(t: Tensor) -> Tensor:
    """The same sizes, strides and contents one element further in memory."""
    storage = torch.zeros(t.numel() + 8, dtype=t.dtype, device=t.device)
    moved = storage[1 : 1 + t.numel()].view(t.shape)
    return moved.copy_(t)


def _other_strides(t: Tensor) -> Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def _replaced(inputs: list[Tensor], i: int, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [*inputs[:i], change(inputs[i]), *inputs[i + 1 :]]


def test_misaligned_inputs_are_copied(built: Built, tmp_path: Path) -> None:
    """By the code that Inductor generates, before the image sees them."""
    x = built.calls[0]
    inputs = [_replaced(x.flat, i, _misaligned) for i in range(len(x.tensors))]
    _, results = cpp_runner.run_cases(built.path, inputs, tmp_path)
    _assert_equal([built.expected[0]] * len(inputs), list(results[: 2 * len(inputs)]), "misaligned")


def test_bad_inputs_are_refused(built: Built, tmp_path: Path) -> None:
    """With a message each, before anything is written; a good call after them works."""
    x = built.calls[0]
    good = x.flat
    caches = range(len(x.tensors) - 2, len(x.tensors))
    work = len(x.tensors) + x.plan._fields.index("work")
    bad: list[tuple[list[Tensor], str]] = [
        (_replaced(good, 0, Tensor.half), "dtype number of input 0"),
        (_replaced(good, 0, Tensor.cpu), "device type of input 0"),
        (_replaced(good, work, Tensor.cpu), f"device type of input {work}"),
        (_replaced(good, work, lambda t: t[:-1]), f"size 0 of input {work}"),
        (_replaced(good, len(good) - 1, lambda t: t[:-1]), f"size 0 of input {len(good) - 1}"),
        *((_replaced(good, i, _other_strides), f"of input {i}") for i in caches),
    ]
    if built.kind.op != "batch_mla":
        many = MAX_ROWS + 1 if built.kind.op == "batch_prefill" else MAX_BATCH + 1
        bad.append((_replaced(good, 0, lambda t: t.new_zeros(many, *t.shape[1:])), f"{many}"))
    texts, after = cpp_runner.run_cases(built.path, [*(case for case, _ in bad), good], tmp_path, "refuse")
    assert len(texts) == len(bad) + 1
    for text, (_, message) in zip(texts, bad, strict=False):
        assert message in text
        assert "expected" in text
    assert texts[-1] == "accepted\n"
    for i, (case, message) in enumerate(bad):
        for before, left in zip(case, after[i * len(good) : (i + 1) * len(good)], strict=True):
            assert torch.equal(before.cpu().nan_to_num(), left.nan_to_num()), message
