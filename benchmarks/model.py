"""A compiled decode step of a model with the sizes of Llama-3-8B and random weights, in a CUDA graph.

The step is that of the demo: it appends to the paged KV cache, attends, and chooses the next token. The graph begins
with planning, so that a replay is all device work for one token of every request.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType

from attn_ops.demo.memory import Capacity, Memory, Step
from attn_ops.demo.model import LanguageModel, ModelConfig
from attn_ops.demo.pages import page_table, pages_for
from attn_ops.demo.rope import frequencies
from attn_ops.demo.steps import DecodeStep
from benchmarks import report
from benchmarks.comparison import logit_gap, release_memory
from benchmarks.timing import replay_microseconds

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
"""Tokens of the shortest and the longest request; those of the others are spaced evenly."""

MODULES = {
    "decode": "attention",
    "combine_decode": "attention",
    "append": "append",
    "plan_decode": "planning",
    "plan_decode_fixed_split": "planning",
}
"""Modules of ``attn_ops.kernels.triton``, and the part of a step that their kernels belong to."""

MAX_LOGIT_GAP = 0.1
"""Largest :func:`~benchmarks.comparison.logit_gap` of chosen tokens."""

NOTE = (
    "Milliseconds of one compiled decode step in one CUDA graph, planning included: 32 layers with the sizes of "
    "Llama-3-8B, random bf16 weights, page 16, requests of 1024 to 2048 tokens. `step` is the median replay. "
    "Attention with its combine, append, planning and the rest are sums of kernel times in profiles of replays; "
    "`gaps` is the time between first and last kernel in which none runs. TB/s counts weights and KV, each read once."
)


class Kernel(NamedTuple):
    """A kernel in a profile, with its start and end in microseconds."""

    name: str
    start: float
    end: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32, 128], help="batch sizes; default: 1 32 128")
    report.add_output(parser)


def random_model(config: ModelConfig, device: str) -> LanguageModel:
    """A model with random weights, scaled so that activations keep their magnitude through the layers."""
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
    """A batch during decoding: random KV caches, shuffled pages, and the last token of each request."""

    def __init__(self, config: ModelConfig, batch: int, device: str, context: tuple[int, int] = CONTEXT) -> None:
        low, high = context
        self.lengths = [low + (high - low) * (2 * b + 1) // (2 * batch) for b in range(batch)]
        pages = [pages_for(length, PAGE) for length in self.lengths]
        capacity = Capacity(batch, PAGE, sum(pages), high, prefill_tokens=PAGE)
        self.memory = Memory(config, capacity, torch.bfloat16, torch.device(device))
        for cache in self.memory.caches:
            cache.normal_()
        order = torch.randperm(sum(pages)).tolist()
        allocated = [[order.pop() for _ in range(count)] for count in pages]
        table = page_table(allocated, self.lengths, PAGE, self.memory.decode.max_pages)
        self.table = [t.to(device) for t in table]
        self.tokens = torch.randint(config.vocab_size, (batch,), device=device)

    def plan(self) -> None:
        """Plan the step."""
        self.memory.decode.plan(*self.table)

    def step(self, step: Step) -> Tensor:
        """Run the step. Returns the next tokens."""
        planner = self.memory.decode
        return step(self.tokens, self.memory.caches, planner.state, planner.workspace)

    def kv_bytes(self, config: ModelConfig) -> int:
        """Bytes of keys and values of all layers."""
        return sum(self.lengths) * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2


def eager_logits(model: LanguageModel, batch: DecodingBatch) -> Tensor:
    """Logits ``[batch, vocabulary]`` of an eager step, float32."""
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, logits: seen.append(logits.float()))
    batch.step(DecodeStep(model))
    hook.remove()
    return seen[0]


def kernels_of(graph: torch.cuda.CUDAGraph) -> list[Kernel]:
    """The kernels of one replay, by start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        graph.replay()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
    return sorted((Kernel(e.name, e.time_range.start, e.time_range.end) for e in events), key=lambda k: k.start)


def gaps(kernels: list[Kernel]) -> float:
    """Microseconds between the first start and the last end in which no kernel runs."""
    idle, covered = 0.0, kernels[0].start
    for kernel in kernels:
        idle += max(0.0, kernel.start - covered)
        covered = max(covered, kernel.end)
    return idle


def weight_bytes(model: LanguageModel) -> int:
    """Bytes of the weights that a step reads: all but the embedding, of which it reads a few rows."""
    weights = (*model.model.layers.parameters(), *model.model.norm.parameters(), *model.lm_head.parameters())
    return sum(w.numel() * w.element_size() for w in weights)


def kernel_parts() -> dict[str, str]:
    """The part of a step of each kernel of :data:`MODULES`, and of the CUDA kernels, which attend or merge, by name."""
    from attn_ops.kernels.cuda.build import specializations  # imports triton

    cuda = dict.fromkeys((one.kernel.function for one in specializations()), "attention")
    modules = {name: importlib.import_module(f"attn_ops.kernels.triton.{name}") for name in MODULES}
    return cuda | {
        name: MODULES[module]
        for module, contents in modules.items()
        for name, value in vars(contents).items()
        if name.endswith("_kernel") and getattr(value, "__module__", None) == contents.__name__
    }


def part_times(kernels: list[Kernel], part_of: dict[str, str]) -> dict[str, float]:
    """Microseconds of the kernels of one replay by part of the step.

    Inductor adds a suffix to kernel names. If a kernel's name contains several names, the longest counts.
    """
    times = dict.fromkeys((*part_of.values(), "rest"), 0.0)
    for kernel in kernels:
        names = [name for name in part_of if name in kernel.name]
        times[part_of[max(names, key=len)] if names else "rest"] += kernel.end - kernel.start
    return {**times, "gaps": gaps(kernels), "kernels": len(kernels)}


def measure(model: LanguageModel, size: int, device: str = "cuda", replays: int = 15) -> report.Row:
    """Compile and time a step of ``size`` requests.

    Raises:
        AssertionError: the compiled step chooses another token than the eager one, beyond rounding.
    """
    batch = DecodingBatch(model.config, size, device)
    compiled = torch.compile(DecodeStep(model), fullgraph=True, dynamic=False)
    batch.plan()
    start = time.perf_counter()
    chosen = batch.step(compiled).clone()
    compiling = time.perf_counter() - start
    if not (found := logit_gap(eager_logits(model, batch), chosen)) < MAX_LOGIT_GAP:
        raise AssertionError(
            f"batch {size}: logits of the tokens of the compiled step are {found:.2f} standard deviations below the "
            f"greatest, expected below {MAX_LOGIT_GAP}"
        )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.plan()
        batch.step(compiled)
    step = statistics.median([replay_microseconds(graph) for _ in range(2 * replays)][replays:])
    part_of = kernel_parts()
    profiles = [part_times(kernels_of(graph), part_of) for _ in range(5)]
    parts = {name: statistics.median(profile[name] for profile in profiles) for name in profiles[0]}
    kv_bytes = batch.kv_bytes(model.config)
    read = weight_bytes(model) + kv_bytes
    return {
        "batch": size,
        "step": step / 1e3,
        **{name: parts[name] / 1e3 for name in ("attention", "append", "rest", "gaps")},
        "planning, us": parts["planning"],
        "kernels": round(parts["kernels"]),
        "tokens/s": size / step * 1e6,
        "TB/s": read / step / 1e6,
        "share": read / step / report.PEAK_BYTES_PER_US,
        "attention TB/s": kv_bytes / parts["attention"] / 1e6,
        "compiling, s": compiling,
    }


def headline(rows: list[report.Row]) -> str:
    """Step time and share of attention at each batch size."""
    steps = "; ".join(
        f"batch {r['batch']}: {r['step']:.2f} ms, {r['attention'] / r['step']:.0%} attention" for r in rows
    )
    return f"{steps}. No peer is measured: this table divides the time of a step."


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Measure and save the batch sizes."""
    model = random_model(LLAMA_3_8B, "cuda")
    rows = []
    for size in args.batches:
        rows.append(measure(model, size))
        release_memory()
        report.save("model", "Model decode step", NOTE, rows, args.output, headline(rows))
