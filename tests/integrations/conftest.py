"""transformers, and its models at small sizes with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.transformers_models import CONFIGS, SHARED_KEYS, SIZES


@pytest.fixture(scope="session")
def transformers() -> Any:
    """The library, with ``attn_ops`` registered."""
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    from attn_ops.integrations.transformers import register

    register()
    return library


@pytest.fixture(scope="session")
def model(transformers: Any) -> Callable[..., Any]:
    """``model(name, implementation, device="cpu")``: with weights that depend on the name alone."""
    made: dict[tuple[str, ...], Any] = {}

    def make(name: str, implementation: str, device: str = "cpu") -> Any:
        key = name, implementation, device
        if key not in made:
            kind, sizes = (CONFIGS | SHARED_KEYS)[name]
            config = getattr(transformers, kind)(**{**SIZES, **sizes})
            found = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
            generator = torch.Generator().manual_seed(1)
            for parameter, weight in found.named_parameters():
                weight.requires_grad_(False).copy_(torch.randn(weight.shape, generator=generator) * 0.2)
                if "norm" in parameter and "gemma" not in name:
                    weight.add_(1)  # Gemma adds it itself
            made[key] = found.to(device)
        return made[key]

    return make
