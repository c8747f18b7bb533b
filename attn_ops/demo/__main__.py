"""``python -m attn_ops.demo``: serve, compile, package and run in C++, check each, and print a report.

With ``--tp N`` the heads are divided over N processes, which serve and compile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from attn_ops.demo.errors import DemoError, first_line
from attn_ops.demo.run import run
from attn_ops.demo.session import Options

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_BATCH = 4096


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Options of the command line. Exits with status 2 if they are wrong, or raises DemoError."""
    parser = argparse.ArgumentParser(
        prog="python -m attn_ops.demo",
        description="A Llama-architecture decoder with continuous batching over a paged KV cache: eager, compiled, "
        "and as an AOTInductor package in a C++ process without Python, each checked against a dense reference.",
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="Hugging Face checkpoint folder (Llama, Mistral, Qwen2, Qwen3)")
    add("--prompt", action="append", default=[], metavar="TEXT", help="a prompt for --model; may be repeated")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on cuda, float32 on cpu")
    add("--batch", type=int, default=8, metavar="N", help="requests that run at once; default: %(default)s")
    add("--max-new-tokens", type=int, default=32, metavar="N", help="per request; default: %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="seed of weights and prompts; default: %(default)s")
    add("--output", type=Path, metavar="DIR", help="keep the packages, the requests and the C++ server in this folder")
    add("--tp", type=int, default=1, metavar="N", help="divide the heads over N processes, on cuda each with a GPU")
    args = parser.parse_args(arguments)
    if not 1 <= args.batch <= MAX_BATCH:
        parser.error(f"--batch is the number of requests that run at once, 1 to {MAX_BATCH}")
    if args.max_new_tokens < 2:
        parser.error("--max-new-tokens is at least 2: prefill gives the first token, decode steps the others")
    if not 0 <= args.seed < 1 << 63:
        parser.error("--seed is a number from 0 to 2**63 - 1")
    if args.prompt and args.model is None:
        parser.error("--prompt needs --model: a model of random weights has no tokenizer")
    if args.tp < 1:
        parser.error("--tp is the number of processes, at least 1")
    if args.tp > 1 and args.output is not None:
        parser.error("--output keeps packages, which --tp does not make")
    device = _device(args.device)
    if device.type == "cuda" and args.tp > torch.cuda.device_count():
        raise DemoError(f"--tp {args.tp} needs that many GPUs; torch sees {torch.cuda.device_count()}")
    dtype = DTYPES[args.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    return Options(
        device=device,
        dtype=dtype,
        model=args.model,
        prompts=tuple(args.prompt),
        batch=args.batch,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        output=args.output,
        ranks=args.tp,
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
    try:
        return torch.empty(0, device=device).device
    except RuntimeError as error:
        count = torch.cuda.device_count()
        raise DemoError(
            f"--device {name} cannot be used ({first_line(error)}); expected cpu, or cuda with a number below {count}"
        ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every check passed, 1 if one failed or could not run, 2 if the run could not start."""
    try:
        options = parse(arguments)
        if options.ranks == 1:
            return run(options)
        from attn_ops.demo.ranks import run_ranks  # imports torch.distributed.tensor

        return run_ranks(options)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
