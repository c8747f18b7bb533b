"""A run of the demo: serve with eager steps, with compiled ones, and with packages in C++, and check each."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from attn_ops.demo import checkpoint, compiling, dense, describe, package, requests
from attn_ops.demo.compiling import Counts
from attn_ops.demo.engine import Engine, Rates, Request
from attn_ops.demo.errors import DemoError
from attn_ops.demo.memory import Capacity, Memory, Step
from attn_ops.demo.model import LanguageModel, ModelConfig, seeded
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
STAGES, STAGES_ON_RANKS = 11, 7
"""Number of stages of a run. A run on several ranks ends before the packages."""

MIN_MULTITHREADED_PARAMETERS = 1 << 27
"""Smaller models run on one CPU thread: their ops are too short to be divided."""


@dataclass(frozen=True)
class Options:
    """Options of the command line. Packages and server are kept in ``output``; they are temporary if it is None.

    ``ranks`` processes divide the heads.
    """

    device: torch.device
    dtype: torch.dtype
    model: Path | None = None
    prompts: tuple[str, ...] = ()
    batch: int = 8
    max_new_tokens: int = 32
    seed: int = 0
    output: Path | None = None
    ranks: int = 1


class Session:
    """A model, its device memory and its requests. The stages of :meth:`run` fill in the report.

    With a ``mesh`` of several ranks each of them has a session, and they serve together. The first one compares with
    the dense reference.
    """

    def __init__(self, options: Options, progress: Progress, mesh: DeviceMesh | None = None) -> None:
        self.options, self.progress, self.mesh = options, progress, mesh
        if options.output is not None:
            _make_folder(options.output)
        with progress.stage("loading the model"):
            self.model, self.tokenizer, self.stop_tokens = _load(options)
            parameters = sum(p.numel() for p in self.model.parameters())
            if options.device.type == "cpu" and parameters < MIN_MULTITHREADED_PARAMETERS:
                torch.set_num_threads(1)
            self.requests = self._requests()
            self.memory = Memory(self.model.config, self._capacity(), options.dtype, options.device, mesh)
            self.served_model = self.model if mesh is None else _shard(self.model, mesh)
        weights = f"seed {options.seed}" if options.model is None else str(options.model)
        lines = describe.header(self.model.config, weights, self.memory, options.dtype, self.requests)
        self.report = Report(lines, cuda_graphs=options.device.type == "cuda")

    @torch.no_grad()
    def run(self) -> Report:
        """Run all stages. A stage that cannot run is listed in the report."""
        eager: Steps = (PrefillStep(self.served_model), DecodeStep(self.served_model))
        with self.progress.stage("warming up"):
            compiling.warm_up(self.memory, *eager)
        row = self._row("eager")
        self._serve(row, eager)
        if shutil.which("g++") is None:
            self.report.skipped.append(
                "compiled steps and the C++ server, which need g++, and it is not on the PATH; install g++"
            )
            return self.report

        before = Counts.now()
        with self.progress.stage("compiling the prefill and decode steps"):
            compiled = compiling.compile_steps(self.served_model, self.memory)
        warm = Counts.now()
        row = self._row("compiled")
        self._serve(row, compiled)
        self.report.compiled, self.report.after = warm.since(before), Counts.now().since(warm)
        if self.mesh is not None:
            return self.report

        row = self._row("AOTInductor, C++")
        with self._folder() as folder:
            try:
                self._serve_in_cpp(row, folder)
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
            row.rates = engine.run(on_tokens)
        self.report.pages.append((engine.allocator.num_free, engine.allocator.num_pages))
        self._compare(row, [request.output for request in self.served])

    def _serve_in_cpp(self, row: Row, folder: Path) -> None:
        with self.progress.stage("exporting and packaging the prefill and decode steps"):
            packages = package.export(self.model, self.memory, folder)
        with self.progress.stage("compiling the C++ server"):
            server = package.build_server(folder)
        with self.progress.stage(f"serving, {row.name}"):
            requests = package.write_requests(self.requests, folder / "requests.txt")
            result = package.serve(server, packages, requests, self.stop_tokens)
        numbers, outputs = result.numbers, result.outputs
        total = sum(map(len, outputs))
        row.rates = Rates.of(numbers["decoded"], numbers["decode_seconds"], total, numbers["seconds"])
        self.report.pages.append((int(numbers["free_pages"]), self.memory.capacity.num_pages))
        self.report.python_mapped = result.python_mapped
        self._compare(row, outputs)

    def _compare(self, row: Row, outputs: Sequence[Sequence[int]]) -> None:
        if self.mesh is not None and self.mesh.get_rank():
            return
        with self.progress.stage("comparing with the dense reference"):
            prompts = [request.prompt for request in self.requests]
            row.equal = dense.compare(self.model, zip(prompts, outputs, strict=True))

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
        raise DemoError(f"--output {path} cannot be created ({error.strerror}); give another folder") from error
    if not os.access(path, os.W_OK):
        raise DemoError(f"--output {path} is not writable; give a writable folder")


def _shard(model: LanguageModel, mesh: DeviceMesh) -> LanguageModel:
    from attn_ops.demo.ranks import shard_model  # imports torch.distributed.tensor

    return shard_model(model, mesh)


def _load(options: Options) -> checkpoint.Checkpoint:
    if options.model is None:
        model = seeded(SEEDED_MODEL, options.seed, options.dtype, options.device)
        return checkpoint.Checkpoint(model, None, frozenset())
    return checkpoint.load(options.model, options.dtype, options.device)
