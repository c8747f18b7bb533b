"""Exports the steps of a small random Llama and the tokens that the server must print: ``python export.py FOLDER``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attn_ops.demo import package
from attn_ops.demo.engine import Engine, Request
from attn_ops.demo.memory import Capacity, Memory
from attn_ops.demo.model import ModelConfig, seeded
from attn_ops.demo.requests import from_seed
from attn_ops.demo.steps import DecodeStep, PrefillStep

CONFIG = ModelConfig(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=320,
    num_layers=2,
    num_qo_heads=8,
    num_kv_heads=2,
    head_dim=32,
    windows=(-1, -1),
)
CAPACITY = Capacity(max_batch=4, page_size=8, num_pages=24, max_tokens=96, prefill_tokens=64)
"""Pages for about half of what four long requests need, so that some start again."""


def export(
    folder: Path, device: str, requests: Sequence[Request], configs: Mapping[str, Any] | None = None
) -> package.Packages:
    """Write the packages, ``requests.txt`` and ``expected.txt`` to ``folder``."""
    model = seeded(CONFIG, 0, torch.float32, torch.device(device))
    memory = Memory(CONFIG, CAPACITY, torch.float32, torch.device(device))
    folder.mkdir(parents=True, exist_ok=True)
    package.write_requests(requests, folder / "requests.txt")
    with torch.no_grad():
        engine = Engine(memory, PrefillStep(model), DecodeStep(model))
        engine.submit(requests)
        engine.run()
    lines = [" ".join(map(str, request.output)) + "\n" for request in requests]
    (folder / "expected.txt").write_text("".join(lines), encoding="utf-8")
    return package.export(model, memory, folder, configs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=12, help="default: %(default)s")
    chosen = parser.parse_args()
    export(chosen.folder, chosen.device, from_seed(chosen.requests, CONFIG.vocab_size, 24, seed=0))
