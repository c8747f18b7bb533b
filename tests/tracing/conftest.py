"""Tracing tests start with an empty compile cache and a reset Dynamo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from filelock import FileLock
from helpers import cpp_runner
from helpers import decoder as d
from torch import Tensor, nn
from torch.export import Dim

import attn_ops


@pytest.fixture(scope="session", autouse=True)
def _cold_packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For packages that several tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def _cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    with torch.no_grad():
        yield


class Package(NamedTuple):
    """A package of ``export_package``, one for all processes, and the planner that it was made with."""

    path: str
    planner: Any
    step: nn.Module
    asked: tuple[Path, dict[str, Any]]  # path and options, as they were passed


def _package(name: str, step: nn.Module, planner: Any, inputs: tuple[Any, ...], **options: Any) -> Package:
    path = cpp_runner.folder / name / "step.pt2"
    configs = {"aot_inductor.metadata": {"model": name}}
    written = str(path)
    with FileLock(f"{path.parent}.lock"):
        if not path.exists():
            inputs = (*inputs, planner.state, planner.workspace)
            written = attn_ops.export_package(step, planner, inputs, path, inductor_configs=configs, **options)
    return Package(written, planner, step, (path, configs))


@pytest.fixture(scope="session")
def decoder_package() -> Package:
    """``helpers.decoder`` for up to 6 requests."""
    shapes = {"x": {0: Dim("batch", min=1, max=6)}}
    return _package("decoder", d.decoder(), d.planner(max_batch=6), d.inputs(), dynamic_shapes=shapes)


class Attend(nn.Module):
    """Prefill over a paged cache, with the caches in a list and an LSE. Plan and workspace have names of their own."""

    def forward(self, caches: list[Tensor], q: Tensor, state: attn_ops.PrefillPlan, scratch: Tensor) -> Any:
        options: dict[str, Any] = {"causal": True, "window_left": 100, "return_lse": True}
        return torch.ops.attn.batch_prefill(q, *caches, state, scratch, **options)


@pytest.fixture(scope="session")
def prefill_package() -> Package:
    """``Attend`` for up to 3 requests with 40 rows, with a fixed split size."""
    sizes = {"page_size": 4, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "max_kv_len": 300}
    planner = attn_ops.PrefillPlanner(
        3, 40, 80, **sizes, causal=True, window_left=100, fixed_split_size=16, num_ctas=6, tile_rows=8
    )
    inputs = ([torch.randn(24, 4, 2, 16) for _ in range(2)], torch.randn(5, 4, 16))
    return _package("prefill", Attend(), planner, inputs, dynamic_shapes={"q": {0: Dim("rows", min=1, max=40)}})


def check_decode_steps(package: str, planner: attn_ops.DecodePlanner, batch: int, tmp_path: Path) -> None:
    """A package of ``helpers.decoder`` gives, in Python and in a C++ process, what the eager steps give."""
    loaded, model = torch._inductor.aoti_load_package(package), d.decoder()
    for lengths in ([7, 0, 20, 2], [1, 48, 3, 9], [0, 0, 0, 0]):
        plan = planner.plan(*d.page_table(lengths[:batch]))
        x, *caches = d.inputs(batch=batch)
        eager, python, cpp = (d.clone(tuple(caches)) for _ in range(3))
        expected = model(x, *eager, plan, planner.workspace)
        torch.testing.assert_close(loaded(x, *python, plan, planner.workspace), expected)
        (result,), mutated = cpp_runner.run(package, [x, *cpp, *plan, planner.workspace], tmp_path)
        torch.testing.assert_close(result, expected)
        for want, in_python, in_cpp in zip(eager, python, mutated[1:3], strict=True):
            torch.testing.assert_close(in_python, want)
            torch.testing.assert_close(in_cpp, want)
