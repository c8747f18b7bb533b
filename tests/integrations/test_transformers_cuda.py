"""Models of transformers on a GPU with ``attn_implementation="attn_ops"`` against their eager attention there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.transformers_models import CONFIGS, STEPS, TOLERANCE, continuous, decode, generate, padded, tokens

Model = Callable[..., Any]

pytestmark = pytest.mark.gpu
each_model = pytest.mark.parametrize("name", CONFIGS)


def both(model: Model, name: str) -> tuple[Any, Any]:
    """With ``attn_ops`` and with eager attention, in float32."""
    return model(name, "attn_ops", "cuda"), model(name, "eager", "cuda")


@each_model
def test_logits(name: str, model: Model) -> None:
    found, eager = both(model, name)
    for ids, mask in (padded(tokens(device="cuda")), padded(tokens(device="cuda"), 0)):
        logits, expected = (each(ids, attention_mask=mask).logits[mask.bool()] for each in (found, eager))
        torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("cache", [None, "static"])
@each_model
def test_greedy_tokens(name: str, cache: str | None, model: Model) -> None:
    found, eager = both(model, name)
    ids, mask = padded(tokens(device="cuda"))
    expected = generate(eager, ids, mask, cache_implementation=cache, disable_compile=True)
    assert torch.equal(generate(found, ids, mask, cache_implementation=cache, disable_compile=True), expected)
    assert len(set(expected[0].tolist())) > 4


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "deepseek-v3"])
def test_continuous_batching(name: str, transformers: Any, model: Model) -> None:
    """Prompts share steps, and decode through block tables where transformers has them."""
    pytest.importorskip("transformers", minversion="5.22", reason="older ones take no other names in generate_batch")
    found, eager = both(model, name)
    prompts = [tokens()[1].tolist(), tokens()[1, :5].tolist(), tokens()[0, 3:].tolist()]
    # The experts of gpt-oss in float32 read on the host which of them have tokens: those steps cannot be captured.
    options = {"use_cuda_graph": False} if name == "gpt-oss" else {}
    generated = continuous(transformers, found, prompts, **options)
    for prompt in prompts:
        expected = generate(eager, torch.tensor([prompt], device="cuda"))[0, len(prompt) :]
        assert generated[tuple(prompt)] == expected.tolist()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compiled(name: str, model: Model) -> None:
    """By Inductor, whose generated code is for this GPU."""
    found, eager = both(model, name)
    ids, mask = padded(tokens(device="cuda"))
    compiled = torch.compile(found, fullgraph=True)
    logits, expected = (each(ids, attention_mask=mask).logits[mask.bool()] for each in (compiled, eager))
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_steps(mode: str, transformers: Any, model: Model) -> None:
    """One graph for all steps over a static cache, replayed as CUDA graphs in ``reduce-overhead``."""
    torch._dynamo.reset()
    found, eager = both(model, "llama")
    cache = [transformers.StaticCache(config=found.config, max_cache_len=32) for _ in range(2)]
    expected = decode(eager, eager, cache[0])
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    compiled = torch.compile(found, fullgraph=True, mode=mode)

    def step(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*args, **kwargs)
        out.logits = out.logits.clone()
        return out

    torch.testing.assert_close(decode(found, step, cache[1]), expected, **TOLERANCE)
    assert expected.shape[1] == STEPS
    assert counts["unique_graphs"] - before == 1


@pytest.mark.parametrize("cache", [None, "static"])
def test_steps_compile_no_kernels(cache: str | None, model: Model) -> None:
    """Whatever their lengths: kernels of the first generation run all of the others."""
    launch = pytest.importorskip("attn_ops.kernels.triton.launch")
    found = model("llama", "attn_ops", "cuda")
    generate(found, tokens(length=9, device="cuda"), disable_compile=True)
    loaded = len(launch._kernel_cache)
    for length in (10, 13, 19, 32):
        ids = tokens(length=length, device="cuda")
        expected = generate(model("llama", "eager", "cuda"), ids, cache_implementation=cache, disable_compile=True)
        assert torch.equal(generate(found, ids, cache_implementation=cache, disable_compile=True), expected)
    assert len(launch._kernel_cache) <= loaded + 4  # pages or strides that are multiples of 16, or are not


def test_layers_after_the_first_do_not_wait(model: Model) -> None:
    """Nor does the first: the mask alone is read."""
    from transformers import DynamicCache
    from transformers.masking_utils import create_causal_mask

    found = model("llama", "attn_ops", "cuda")
    cache, ids = DynamicCache(config=found.config), tokens(device="cuda")
    with torch.no_grad():
        found(ids, past_key_values=cache)
        for _ in range(2):
            token, mask = ids[:, -1:], torch.ones(2, cache.get_seq_length() + 1, dtype=torch.int64, device="cuda")
            hidden = found.model.embed_tokens(token)
            positions = torch.full((2, 1), cache.get_seq_length(), device="cuda")
            bounds = create_causal_mask(found.config, hidden, mask, cache, position_ids=positions)
            rotary = found.model.rotary_emb(hidden, positions)
            torch.cuda.set_sync_debug_mode("error")
            try:
                for layer in found.model.layers:
                    hidden = layer(
                        hidden,
                        attention_mask=bounds,
                        position_ids=positions,
                        past_key_values=cache,
                        position_embeddings=rotary,
                    )
            finally:
                torch.cuda.set_sync_debug_mode("default")
