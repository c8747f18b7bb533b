"""transformers, and its models at small sizes with random weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.transformers_models import CONFIGS, SIZES

ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="session")
def transformers() -> Any:
    """The library, with ``attn_ops`` registered."""
    kept = sys.path[:]
    # transformers looks for a package `kernels`, and a checkout has a folder of that name.
    sys.path[:] = [path for path in sys.path if path and Path(path).resolve() != Path(ROOT)]
    try:
        library = pytest.importorskip("transformers", reason="transformers is not installed")
        from transformers.utils import is_kernels_available

        is_kernels_available()
        from attn_ops.integrations.transformers import register

        register()
    finally:
        sys.path[:] = kept
    return library


@pytest.fixture(scope="session")
def model(transformers: Any) -> Callable[[str, str], Any]:
    """``model(name, implementation)``: with weights that depend on the name alone."""
    made: dict[tuple[str, str], Any] = {}

    def make(name: str, implementation: str) -> Any:
        if (name, implementation) not in made:
            kind, sizes = CONFIGS[name]
            config = getattr(transformers, kind)(**{**SIZES, **sizes})
            found = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
            generator = torch.Generator().manual_seed(1)
            for parameter, weight in found.named_parameters():
                weight.requires_grad_(False).copy_(torch.randn(weight.shape, generator=generator) * 0.2)
                if "norm" in parameter and "gemma" not in name:
                    weight.add_(1)  # Gemma adds it itself
            made[name, implementation] = found
        return made[name, implementation]

    return make
