"""``python -m attn_ops.demo``: serve, check, compile, package and run in C++, and say how it went."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from attn_ops.demo.errors import DemoError
from attn_ops.demo.progress import Progress
from attn_ops.demo.session import STAGES, Options, Session

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m attn_ops.demo",
        description="A Llama-architecture decoder with continuous batching over a paged KV cache: eager, compiled, "
        "and as an AOTInductor package in a C++ process without Python, each checked against a dense run.",
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="Hugging Face checkpoint folder (Llama, Mistral, Qwen2, Qwen3)")
    add("--prompt", action="append", default=[], metavar="TEXT", help="a prompt for --model; may be repeated")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on cuda, float32 on cpu")
    add("--batch", type=int, default=8, metavar="N", help="requests that run at once; default: %(default)s")
    add("--max-new-tokens", type=int, default=32, metavar="N", help="per request; default: %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="of weights and prompts; default: %(default)s")
    add("--output", type=Path, metavar="DIR", help="keep the packages, their inputs and the C++ runner in this folder")
    args = parser.parse_args(arguments)
    if args.batch < 1:
        parser.error("--batch is the number of requests that run at once, at least 1")
    if args.max_new_tokens < 2:
        parser.error("--max-new-tokens is at least 2: the first token is the prefill's, the others are decoded")
    if args.prompt and args.model is None:
        parser.error("--prompt needs --model: a model of random weights has no tokenizer")
    device = _device(args.device)
    dtype = DTYPES[args.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    return Options(
        device, dtype, args.model, tuple(args.prompt), args.batch, args.max_new_tokens, args.seed, args.output
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DemoError(f"--device {name} is not a device; expected cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DemoError(f"--device {name}: torch sees no CUDA device here; use --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise DemoError(f"--device {name} is not supported; expected cpu or cuda")
    return torch.empty(0, device=device).device


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every check held, 1 where one failed or could not run, 2 where the run could not start."""
    try:
        options = parse(arguments)
        progress = Progress(STAGES)
        try:
            session = Session(options, progress)
            report = session.run()
        finally:
            progress.close()
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report.render())
    for text in session.completions(3):
        print(f"\n{text}")
    failures = report.failures()
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
