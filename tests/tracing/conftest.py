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


class DecoderPackage(NamedTuple):
    """A package of ``helpers.decoder`` for up to 6 requests, of ``export_package``: one for all processes."""

    path: str
    planner: attn_ops.DecodePlanner
    asked: tuple[Path, dict[str, Any]]  # path and options, as they were passed


@pytest.fixture(scope="session")
def decoder_package() -> DecoderPackage:
    planner, path = d.planner(max_batch=6), cpp_runner.folder / "decoder" / "step.pt2"
    configs = {"aot_inductor.metadata": {"model": "decoder"}}
    inputs = (*d.inputs(), planner.state, planner.workspace)
    shapes = {"x": {0: Dim("batch", min=1, max=6)}}
    package = str(path)
    with FileLock(f"{path.parent}.lock"):
        if not path.exists():
            package = attn_ops.export_package(
                d.decoder(), planner, inputs, path, dynamic_shapes=shapes, inductor_configs=configs
            )
    return DecoderPackage(package, planner, (path, configs))
