"""A run of the demo: serve eager and compiled, check both, package the decode step and run it in C++."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from attn_ops.demo import checkpoint, compiling, decoding, dense, describe, package, requests
from attn_ops.demo.compiling import Counts
from attn_ops.demo.decoding import Decoded
from attn_ops.demo.engine import Engine, Request, Snapshot
from attn_ops.demo.errors import DemoError
from attn_ops.demo.memory import Capacity, Memory, Step
from attn_ops.demo.model import ModelConfig, seeded
from attn_ops.demo.pages import pages_for
from attn_ops.demo.progress import Progress
from attn_ops.demo.report import Report, Row
from attn_ops.demo.steps import DecodeStep, PrefillStep

SEEDED_MODEL = ModelConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1408,
    num_layers=4,
    num_qo_heads=8,
    num_kv_heads=2,
    head_dim=64,
    windows=(-1,) * 4,
)
Steps = tuple[Step, Step]

PAGE_SIZE = 16
PREFILL_TOKENS = 128
REQUESTS_PER_SLOT = 2
TIMED_REPEATS = 3
STAGES = 15
MIN_MULTITHREADED_PARAMETERS = 1 << 27
"""Smaller models run on one CPU thread: their ops are too short to be divided."""


@dataclass(frozen=True)
class Options:
    """Options of the command line. Packages and runner are kept in ``output``; they are temporary if it is None."""

    device: torch.device
    dtype: torch.dtype
    model: Path | None = None
    prompts: tuple[str, ...] = ()
    batch: int = 8
    max_new_tokens: int = 32
    seed: int = 0
    output: Path | None = None


class Session:
    """A model, its device memory and its requests. The stages of :meth:`run` fill in the report."""

    def __init__(self, options: Options, progress: Progress) -> None:
        self.options, self.progress = options, progress
        if options.output is not None:
            _make_folder(options.output)
        with progress.stage("loading the model"):
            self.model, self.tokenizer, self.stop_tokens = _load(options)
            parameters = sum(p.numel() for p in self.model.parameters())
            if options.device.type == "cpu" and parameters < MIN_MULTITHREADED_PARAMETERS:
                torch.set_num_threads(1)
            self.requests = self._requests()
            self.memory = Memory(self.model.config, self._capacity(), options.dtype, options.device)
        weights = f"seed {options.seed}" if options.model is None else str(options.model)
        lines = describe.header(self.model.config, weights, self.memory, options.dtype, self.requests)
        self.report = Report(lines, cuda_graphs=options.device.type == "cuda")

    @torch.no_grad()
    def run(self) -> Report:
        """Run all stages. A stage that cannot run is listed in the report."""
        eager: Steps = (PrefillStep(self.model), DecodeStep(self.model))
        with self.progress.stage("warming up"):
            compiling.warm_up(self.memory, *eager)
        row = self._row("eager")
        self._serve(row, eager)
        if shutil.which("g++") is None:
            self.report.skipped.append(
                "compiled steps and the C++ runner, which need g++, and it is not on the PATH; install g++"
            )
            return self.report
        self._decode(row, eager)

        before = Counts.now()
        with self.progress.stage("compiling the prefill and decode steps"):
            compiled = compiling.compile_steps(self.model, self.memory)
        warm = Counts.now()
        row = self._row("compiled")
        self._serve(row, compiled)
        self._decode(row, compiled)
        self.report.compiled, self.report.after = warm.since(before), Counts.now().since(warm)

        row = self._row("AOTInductor, C++")
        with self._folder() as folder:
            try:
                self._decode_in_cpp(row, compiled, folder)
            except DemoError as error:
                self.report.skipped.append(str(error))
        return self.report

    def completions(self, count: int) -> list[str]:
        """Prompts and outputs of the first ``count`` requests as text. Empty without a tokenizer."""
        if self.tokenizer is None:
            return []
        return [self.tokenizer.decode([*r.prompt, *r.output]) for r in self.served[:count]]

    def _row(self, name: str) -> Row:
        self.report.rows.append(Row(name))
        return self.report.rows[-1]

    def _serve(self, row: Row, steps: Steps) -> None:
        """Serve all requests with continuous batching, and compare with the dense reference."""
        self.memory.poison_caches()
        self.served = [request.fresh() for request in self.requests]
        engine = Engine(self.memory, *steps, self.stop_tokens)
        engine.submit(self.served)
        total = sum(request.max_new_tokens for request in self.served)
        with self.progress.tokens(f"serving, {row.name}", total) as on_tokens:
            seconds = engine.run(on_tokens)
        row.serving_rate = sum(len(request.output) for request in self.served) / seconds
        self.report.pages.append((engine.allocator.num_free, engine.allocator.num_pages))
        self._compare(row, [(request.prompt, request.output) for request in self.served])

    def _decode(self, row: Row, steps: Steps) -> None:
        """Decode the first batch of requests for a fixed number of steps, as the C++ runner does."""
        with self.progress.stage(f"decoding, {row.name}"):
            start = self._snapshot(steps)
            decoded = decoding.decode(steps[1], self.memory, start, self._decode_steps, TIMED_REPEATS)
        self._record(row, start, decoded)

    def _decode_in_cpp(self, row: Row, steps: Steps, folder: Path) -> None:
        with self.progress.stage("exporting and packaging the decode step"):
            artifact = package.build(self.model, self.memory, folder)
        with self.progress.stage("compiling the C++ runner"):
            runner = package.compile_runner(folder, self.options.device)
        with self.progress.stage(f"decoding, {row.name}"):
            start = self._snapshot(steps)
            result = package.run(runner, artifact, self.memory, start, self._decode_steps, TIMED_REPEATS)
        self.report.python_mapped = result.python_mapped
        self._record(row, start, Decoded(result.tokens, result.seconds))

    def _snapshot(self, steps: Steps) -> Snapshot:
        """Prefill the first batch of requests in an empty KV cache."""
        self.memory.poison_caches()
        return Engine(self.memory, *steps).snapshot([Request(r.prompt, r.max_new_tokens) for r in self.requests])

    def _record(self, row: Row, start: Snapshot, decoded: Decoded) -> None:
        sequences = start.sequences(decoded.tokens)
        row.decode_rate = len(sequences) * self._decode_steps / decoded.seconds
        self._compare(row, sequences)

    def _compare(self, row: Row, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        with self.progress.stage("comparing with the dense reference"):
            row.equal = row.equal + dense.compare(self.model, sequences)

    @property
    def _decode_steps(self) -> int:
        """Decode steps of a request. Prefill gives its first output token."""
        return self.options.max_new_tokens - 1

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        if self.options.output is None:
            with tempfile.TemporaryDirectory(prefix="attn_ops_demo_") as folder:
                yield Path(folder)
        else:
            yield self.options.output

    def _requests(self) -> list[Request]:
        count, new = REQUESTS_PER_SLOT * self.options.batch, self.options.max_new_tokens
        if self.options.model is None or (self.tokenizer is None and not self.options.prompts):
            return requests.from_seed(count, self.model.config.vocab_size, new, self.options.seed)
        if self.tokenizer is None:
            raise DemoError(
                f"--prompt needs a tokenizer, and {self.options.model} holds no tokenizer.json; add that file"
            )
        return requests.from_texts(
            self.options.prompts or requests.TEXTS, self.tokenizer, self.model.config.vocab_size, count, new
        )

    def _capacity(self) -> Capacity:
        """Capacity for every request, with pages for two thirds of a batch of longest requests: some must wait."""
        longest = max(request.max_tokens for request in self.requests)
        if longest > self.model.config.max_positions:
            raise DemoError(
                f"the longest request has {longest} tokens and the model {self.model.config.max_positions} "
                "positions; shorten the prompt or --max-new-tokens"
            )
        pages_per_request = pages_for(longest, PAGE_SIZE)
        pages = max(pages_per_request, 2 * pages_per_request * self.options.batch // 3)
        return Capacity(self.options.batch, PAGE_SIZE, pages, longest, PREFILL_TOKENS)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"--output {path} cannot be created ({error.strerror}); give a folder that can be") from error
    if not os.access(path, os.W_OK):
        raise DemoError(f"--output {path} is not writable; give a folder that is")


def _load(options: Options) -> checkpoint.Checkpoint:
    if options.model is None:
        model = seeded(SEEDED_MODEL, options.seed, options.dtype, options.device)
        return checkpoint.Checkpoint(model, None, frozenset())
    return checkpoint.load(options.model, options.dtype, options.device)
