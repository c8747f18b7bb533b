"""``python -m helpers.fuzz [NAME ...] --seconds 600``: random valid calls until the time is over, failures printed.

``--seed N`` runs one seed, as the message of a failure says.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
from collections import Counter

import torch

from helpers.backends import INTERPRETED, install_interpreter
from helpers.fuzz.calls import CALLS
from helpers.fuzz.run import FuzzError, run_seed

MAX_FAILURES = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m helpers.fuzz")
    parser.add_argument("names", nargs="*", metavar="NAME", help="calls to draw, by default all")
    parser.add_argument("--seed", type=int, help="only this seed")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--size", default="medium", choices=["small", "medium", "large"])
    parser.add_argument("--trace", action="store_true", help="every call through torch.compile too")
    parser.add_argument("--trace-every", type=int, default=50, help="seeds between calls through torch.compile")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if INTERPRETED:
        install_interpreter()
    options = {"device": args.device, "backend": args.backend, "size": args.size}
    done, failed, end = Counter[str](), 0, time.monotonic() + args.seconds
    for seed in itertools.count(args.first) if args.seed is None else [args.seed]:
        for name in args.names or CALLS:
            try:
                run_seed(
                    name, seed, **options, trace=args.trace or (seed % args.trace_every == 7 and args.seed is None)
                )
            except FuzzError as error:
                failed += 1
                if args.seed is None:
                    print(error, flush=True)
                else:
                    traceback.print_exc()
            done[name] += 1
        if time.monotonic() > end or failed >= MAX_FAILURES:
            break
    print(f"{done.total()} calls of {len(done)} kinds from seed {args.first} on, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
