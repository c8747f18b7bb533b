"""A decode step of a 32-layer model of Llama-3-8B's shape with random weights, compiled, in a CUDA graph.

The step is the demo's: it appends to the paged cache, attends, and chooses the next token. The graph plans first, so
a replay is all that the device does for a token of every request.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType

from attn_ops.demo.memory import Capacity, Memory, Step
from attn_ops.demo.model import LanguageModel, ModelConfig
from attn_ops.demo.pages import page_table, pages_for
from attn_ops.demo.rope import frequencies
from attn_ops.demo.steps import DecodeStep

from . import report
from .contest import release
from .timing import replay_microseconds

LLAMA_3_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_qo_heads=32,
    num_kv_heads=8,
    head_dim=128,
    windows=(-1,) * 32,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_positions=8192,
)
PAGE = 16
CONTEXT = (1024, 2048)
"""Tokens of a request, spread evenly between these over the batch."""

ATTENTION, MERGE, APPEND, PLAN = "decode_kernel", "merge_rows_kernel", "append_kernel", "plan_decode_kernel"
NEAR_BEST = 0.1
"""How far a chosen token's logit may be from the greatest, in standard deviations of the logits."""

NOTE = (
    "32 layers of Llama-3-8B's shape, random bf16 weights, page 16, requests of 1024 to 2048 tokens: one step of "
    "the demo's compiled decode, planning included, in one CUDA graph. Milliseconds. `step` is the median replay; "
    "attention with its merge, append, planning and the rest are sums of kernel times from a profile of replays, and "
    "`gaps` is the time from the first kernel's begin to the last one's end in which none ran. TB/s counts weights "
    "and KV read once."
)


class Kernel(NamedTuple):
    name: str
    begin: float  # microseconds
    end: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32, 128])
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")


def random_model(config: ModelConfig, device: str) -> LanguageModel:
    """Weights drawn on the device, scaled so that activations keep their size."""
    with torch.device("meta"):
        model = LanguageModel(config)
    model = model.to(torch.bfloat16).to_empty(device=device).eval().requires_grad_(False)
    model.model.inv_freq = frequencies(config.head_dim, config.rope_theta, config.rope_scaling).to(device)
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5, generator=generator)
    return model


class DecodingBatch:
    """A batch in the middle of its output: caches of random keys, shuffled pages, the newest tokens."""

    def __init__(self, config: ModelConfig, batch: int, device: str, context: tuple[int, int] = CONTEXT) -> None:
        low, high = context
        self.lengths = [low + (high - low) * (2 * b + 1) // (2 * batch) for b in range(batch)]
        pages = [pages_for(length, PAGE) for length in self.lengths]
        capacity = Capacity(batch, PAGE, sum(pages), high, prefill_tokens=PAGE)
        self.memory = Memory(config, capacity, torch.bfloat16, torch.device(device))
        for cache in self.memory.caches:
            cache.normal_()
        order = torch.randperm(sum(pages)).tolist()
        held = [[order.pop() for _ in range(count)] for count in pages]
        table = page_table(held, self.lengths, PAGE, self.memory.decode.max_pages)
        self.table = [t.to(device) for t in table]
        self.tokens = torch.randint(config.vocab_size, (batch,), device=device)

    def plan(self) -> None:
        self.memory.decode.plan(*self.table)

    def step(self, step: Step) -> Tensor:
        planner = self.memory.decode
        return step(self.tokens, self.memory.caches, planner.state, planner.workspace)

    def kv_bytes(self, config: ModelConfig) -> int:
        return sum(self.lengths) * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2


def regret(model: LanguageModel, batch: DecodingBatch, chosen: Tensor) -> float:
    """How far the eager step's logits of the tokens ``chosen`` are from its greatest, in standard deviations."""
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, logits: seen.append(logits.float()))
    batch.step(DecodeStep(model))
    hook.remove()
    logits = seen[0]
    behind = logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]
    return float((behind / logits.std(-1)).max())


def kernels_of(graph: torch.cuda.CUDAGraph) -> list[Kernel]:
    """The kernels of one replay, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        graph.replay()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
    return sorted((Kernel(e.name, e.time_range.start, e.time_range.end) for e in events), key=lambda k: k.begin)


def gaps(kernels: list[Kernel]) -> float:
    """Microseconds between the first begin and the last end in which no kernel runs."""
    idle, covered = 0.0, kernels[0].begin
    for kernel in kernels:
        idle += max(0.0, kernel.begin - covered)
        covered = max(covered, kernel.end)
    return idle


def _total(kernels: list[Kernel], name: str) -> float:
    return sum(k.end - k.begin for k in kernels if name in k.name)


def weight_bytes(model: LanguageModel) -> int:
    """What a step reads of the weights: all but the embedding, of which it takes a few rows."""
    weights = (*model.model.layers.parameters(), *model.model.norm.parameters(), *model.lm_head.parameters())
    return sum(w.numel() * w.element_size() for w in weights)


def parts(kernels: list[Kernel]) -> dict[str, float]:
    """Microseconds of one replay's kernels by what they are for."""
    planning, append = _total(kernels, PLAN), _total(kernels, APPEND)
    attention = _total([k for k in kernels if PLAN not in k.name], ATTENTION) + _total(kernels, MERGE)
    rest = _total(kernels, "") - attention - append - planning
    times = {"attention": attention, "append": append, "planning": planning, "rest": rest}
    return {**times, "gaps": gaps(kernels), "kernels": len(kernels)}


def measure(model: LanguageModel, size: int, device: str = "cuda", replays: int = 15) -> report.Row:
    batch = DecodingBatch(model.config, size, device)
    compiled = torch.compile(DecodeStep(model), fullgraph=True, dynamic=False)
    batch.plan()
    began = time.perf_counter()
    chosen = batch.step(compiled).clone()
    compiling = time.perf_counter() - began
    if not (behind := regret(model, batch, chosen)) < NEAR_BEST:
        raise AssertionError(f"batch {size}: the compiled step chose tokens {behind:.2f} deviations from the best")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.plan()
        batch.step(compiled)
    step = statistics.median([replay_microseconds(graph) for _ in range(2 * replays)][replays:])
    profiles = [parts(kernels_of(graph)) for _ in range(5)]
    found = {name: statistics.median(profile[name] for profile in profiles) for name in profiles[0]}
    kv_bytes = batch.kv_bytes(model.config)
    read = weight_bytes(model) + kv_bytes
    return {
        "batch": size,
        "step": step / 1e3,
        **{name: found[name] / 1e3 for name in ("attention", "append", "rest", "gaps")},
        "planning, us": found["planning"],
        "kernels": round(found["kernels"]),
        "tokens/s": size / step * 1e6,
        "TB/s": read / step / 1e6,
        "share": read / step / report.READ_RATE,
        "attention TB/s": kv_bytes / found["attention"] / 1e6,
        "compiling, s": compiling,
    }


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    model = random_model(LLAMA_3_8B, "cuda")
    rows = []
    for size in args.batches:
        rows.append(measure(model, size))
        release()
        report.save("model", "Model decode step", NOTE, rows, args.output)
