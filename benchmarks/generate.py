"""Tokens per second of transformers' ``generate`` and ``generate_batch``, compared with its own attention.

Every implementation has a model of its own over the same random weights. They take turns in one process. Their tokens
are checked, and for this library also how often it plans and compiles.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import report
from benchmarks.comparison import ALL, NotMeasured, add_peers, logit_gap, reason_of

OURS = "attn_ops"
PEERS = ("sdpa", "flash_attention_2", "flash_attention_3")
LIBRARIES = ("transformers", "flash_attn", "flash_attn_interface")

SIZES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    },
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
}
"""Fields of a LlamaConfig."""

KINDS_OF_LAYERS = 1
"""Kinds of layers of a Llama: all layers see all keys, so a step has one plan."""

MODES = ("generate, dynamic cache", "generate_batch", "generate, static cache", "generate, static cache, compiled")
BATCH, COMPILED = MODES[1], MODES[3]
"""The compiled mode takes a minute or more for each implementation before it generates."""

BLOCK = 256
"""Tokens in a block of transformers' paged cache."""

STEPS = 20
"""Steps after the warm-up, in which nothing may compile."""

MAX_LOGIT_GAP = 0.3
"""Largest :func:`~benchmarks.comparison.logit_gap` of generated tokens. On an H200 in bfloat16, sdpa's own tokens
reached 0.12 with 8 requests, and those of attn_ops 0.20 with 32."""

NOTE = (
    "Generated tokens per second of transformers, prompts included: `batch` requests with prompts of `prompt` random "
    "tokens, each continued by `new` tokens, greedily. Random weights. The median of rounds in which implementations "
    "take turns. `generate_batch` keeps its manager, whose CUDA graphs are captured before, and shares no prefixes. "
    "`plans per step` and `recompiles` are those of attn_ops over at least 20 steps after warm-up; of compiled code, "
    "the plans in a graph. On a CPU plans of equal lengths are used again."
)


class Workload(NamedTuple):
    """Prompts ``[batch, tokens]`` and the number of new tokens of each."""

    prompts: Tensor
    new: int


class Checks(NamedTuple):
    """Plans of this library in each step or graph of a run, if counted, and graphs that were compiled."""

    plans_per_step: float | None
    recompiles: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size", choices=SIZES, default="8b", help="of the model; default: 8b, as Llama-3-8B")
    parser.add_argument("--layers", type=int, help="of the model; default: those of its size. Fewer compile faster")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32], help="batch sizes; default: 1 8 32")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt; default: 1024")
    parser.add_argument("--new", type=int, default=32, help="tokens that are generated; default: 32")
    parser.add_argument("--modes", nargs="*", default=MODES, choices=MODES, help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--seconds", type=float, default=90, help="after which no row is begun; default: 90")
    parser.add_argument("--compile-backend", default="inductor", help="of torch.compile; default: inductor")
    report.add_output(parser)
    add_peers(parser)


def make_models(
    size: str, device: str, dtype: torch.dtype, names: Iterable[str], layers: int | None = None
) -> dict[str, Any]:
    """A model for each attention implementation, over the same weights; with ``layers`` layers, if given."""
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    fields = {**SIZES[size], **({} if layers is None else {"num_hidden_layers": layers})}
    config = LlamaConfig(**fields, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    with torch.device(device):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM
        first = model._from_config(config, dtype=dtype).eval().requires_grad_(False)
    shared = (*first.parameters(), *first.buffers())
    found = {name: copy.deepcopy(first, {id(t): t for t in shared}) for name in names}
    for name, model in found.items():
        model.set_attn_implementation(name)
    return found


def tokens_of(
    mode: str, model: Any, work: Workload, backend: str = "inductor", keep: bool = False, **batching: Any
) -> Tensor:
    """Prompts and new tokens, ``[batch, prompt + new]``.

    ``keep``: the manager of ``generate_batch``, for the next call.
    """
    from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig

    options: dict[str, Any] = {"max_new_tokens": work.new, "do_sample": False, "pad_token_id": 0}
    prompts = work.prompts
    if mode != BATCH:
        if "static" in mode:
            options |= {"cache_implementation": "static", "disable_compile": mode != COMPILED}
        if mode == COMPILED:
            graphs: Any = "reduce-overhead" if prompts.is_cuda and backend == "inductor" else None
            compiling: Any = CompileConfig(backend=backend, mode=graphs)
            compiling._compile_all_devices = True
            options["compile_config"] = compiling
        return model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    batch, length = prompts.shape
    blocks = batch * -(-(length + work.new) // BLOCK) + 1
    config = ContinuousBatchingConfig(
        page_size=BLOCK,
        num_blocks=blocks,
        max_batch_tokens=batch * length,
        auto_switch_to_flash=False,
        allow_block_sharing=False,
        **batching,
    )
    results = model.generate_batch(
        prompts.tolist(),
        generation_config=GenerationConfig(**options, eos_token_id=-1),
        continuous_batching_config=config,
        persistent_manager=keep,
    )
    new = {tuple(r.prompt_ids): r.generated_tokens for r in results.values()}
    generated = [new[tuple(prompt)] for prompt in prompts.tolist()]
    return torch.cat((prompts, torch.tensor(generated, device=prompts.device)), 1)


def check_tokens(name: str, mode: str, reference: Any, tokens: Tensor, new: int) -> None:
    """Raise AssertionError if the last ``new`` tokens are not those of the model ``reference``, beyond rounding."""
    logits = reference(tokens, logits_to_keep=new + 1, use_cache=False).logits[:, :-1].float()
    if not (found := logit_gap(logits, tokens[:, -new:])) < MAX_LOGIT_GAP:
        raise AssertionError(
            f"{mode}: logits of tokens of {name} are {found:.2f} standard deviations below the greatest, expected less "
            f"than {MAX_LOGIT_GAP}"
        )


def warm_up(mode: str, model: Any, work: Workload, backend: str) -> Tensor:
    """Run once, or twice where code is compiled for the second step too. Returns the tokens."""
    for _ in range(2 if mode == COMPILED else 1):
        tokens = tokens_of(mode, model, work, backend, keep=True)
    return tokens


def check_plans(mode: str, model: Any, work: Workload, backend: str) -> tuple[Checks, Tensor]:
    """Run the warm-up and at least ``STEPS`` steps. Returns also the tokens of the warm-up.

    Raises:
        AssertionError: a step has more plans than the model has kinds of layers, or something was compiled after the
            warm-up.
    """
    steps, work = [0], work._replace(new=max(work.new, STEPS + 2))
    from torch._dynamo.utils import counters  # takes half a second to import

    counters.clear()
    tokens = warm_up(mode, model, work, backend)
    graphs, planned = counters["stats"]["unique_graphs"], counters["attn_ops"]["plans"]
    assert (graphs > 0) == (mode == COMPILED), f"{mode}: {graphs} graphs were compiled"

    def count(module: Any, args: Any) -> None:
        steps[0] += 1

    if mode == COMPILED:
        tokens_of(mode, model, work, backend)
        plans = planned / graphs if backend == "inductor" else None
    else:
        if mode == BATCH:  # its manager replays graphs, in which no step is counted
            model.destroy_cached_continuous_batching_manager()
        every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # generate_batch has one of its own
        hook = model.get_input_embeddings().register_forward_pre_hook(count)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=every) as measured:
            tokens_of(mode, model, work, backend, **({"use_cuda_graph": False} if mode == BATCH else {}))
        hook.remove()
        if mode == BATCH:
            warm_up(mode, model, work, backend)
        assert steps[0] >= STEPS, f"{mode}: {steps[0]} steps"
        # key_averages() takes longer than the run, since it makes objects of half a million events.
        assert measured.profiler is not None
        events = measured.profiler.kineto_results.events()
        plans = sum(e.name().startswith("attn::plan_") for e in events) / steps[0]
    recompiles = counters["stats"]["unique_graphs"] - graphs
    if recompiles:
        raise AssertionError(f"{mode}: {recompiles} graphs were compiled in {STEPS} steps after warm-up, expected 0")
    if plans is not None and plans > KINDS_OF_LAYERS:
        raise AssertionError(f"{mode}: {plans:g} plans per step, expected {KINDS_OF_LAYERS}, for all layers")
    return Checks(plans, recompiles), tokens


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def measure(
    mode: str, models: dict[str, Any], work: Workload, rounds: int, not_measured: list[NotMeasured], backend: str
) -> report.Row:
    """Check and time all implementations that run ``mode``.

    Raises:
        AssertionError: tokens of this library are wrong, or it plans or compiles too often.
    """
    batch, prompt = work.prompts.shape
    what = f"{mode}, batch {batch}"
    checks, generated = check_plans(mode, models[OURS], work, backend)
    running = {}
    for name, model in models.items():
        try:
            tokens = generated if name == OURS else warm_up(mode, model, work, backend)
            check_tokens(name, mode, models["sdpa"], tokens, tokens.shape[1] - prompt)
            running[name] = model
        except Exception as error:  # other libraries raise any type
            if name == OURS:
                raise
            not_measured.append(NotMeasured(name, what, reason_of(error)))
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, model in running.items():
            call = lambda model=model: tokens_of(mode, model, work, backend, keep=True)  # noqa: E731
            times[name].append(seconds(call, work.prompts.device))
    rates = {name: batch * work.new / statistics.median(found) for name, found in times.items()}
    return {
        "what": what,
        **{name: rates.get(name) for name in models},
        "prompt": prompt,
        "new": work.new,
        "plans per step": checks.plans_per_step,
        "recompiles": checks.recompiles,
    }


def installed(names: Iterable[str]) -> dict[str, str]:
    """Reasons why transformers cannot run implementations here, by name."""
    from transformers import modeling_flash_attention_utils as flash
    from transformers import utils

    available = {
        "flash_attention_2": utils.is_flash_attn_2_available,
        "flash_attention_3": utils.is_flash_attn_3_available,
    }
    reasons = {}
    for name in (name for name in names if name in available):
        if not available[name]():
            reasons[name] = "not installed, or without CUDA"
            continue
        try:
            flash.lazy_import_flash_attention(name)
        except ImportError as error:  # built for another torch, or without a package that it needs
            reasons[name] = reason_of(error)
    return reasons


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Measure and save.

    Raises:
        Exception: the first of this library's, after all rows.
    """
    from attn_ops.integrations.transformers import register

    selected = [name for name in PEERS if name.startswith(tuple(args.peers))]
    absent = installed(selected)
    names = [register(), "sdpa", *(name for name in selected if name not in absent and name != "sdpa")]
    rows: list[report.Row] = []
    failures: list[Exception] = []
    late: list[str] = []
    not_measured = [NotMeasured(name, "every row", reason) for name, reason in absent.items()]
    models = make_models(args.size, args.device, getattr(torch, args.dtype), names, args.layers)
    vocabulary = SIZES[args.size]["vocab_size"]
    columns = report.Columns((OURS,), PEERS, higher_is_better=True)
    shown = f"{args.size}, {args.layers or SIZES[args.size]['num_hidden_layers']} layers"
    title, start = f"Tokens per second of generate, Llama of size {shown}, {args.dtype}", time.perf_counter()
    for mode in args.modes:
        for batch in args.batches:
            if time.perf_counter() - start > args.seconds:
                late.append(f"{mode}, batch {batch}")
                continue
            prompts = torch.randint(2, vocabulary, (batch, args.prompt), device=args.device)
            work = Workload(prompts, args.new)
            try:
                rows.append(measure(mode, models, work, args.rounds, not_measured, args.compile_backend))
            except Exception as error:  # the other rows are measured before it is raised
                failures.append(error)
                print(f"{mode}, batch {batch}: {type(error).__name__}: {error}", flush=True)
            else:
                report.save("generate", title, NOTE, rows, args.output, columns, not_measured, LIBRARIES)
            finally:
                for model in models.values():
                    model.destroy_cached_continuous_batching_manager()
            torch._dynamo.reset()
    if rows and late:
        not_measured.append(NotMeasured(ALL, "; ".join(late), f"not begun within {args.seconds:g} s"))
        report.save("generate", title, NOTE, rows, args.output, columns, not_measured, LIBRARIES)
    if failures:
        raise failures[0]
