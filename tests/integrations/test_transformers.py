"""Models of transformers with ``attn_implementation="attn_ops"`` against the same models with its eager attention."""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.transformers_models import (
    CONFIGS,
    SHARED_KEYS,
    STEPS,
    TOLERANCE,
    continuous,
    decode,
    generate,
    padded,
    tokens,
)
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from attn_ops.errors import ArgumentError, GradientError, ShapeError, UnsupportedError
from attn_ops.frontend import shared_plans
from attn_ops.frontend.call_plans import BlockTables, RaggedLengths
from attn_ops.integrations.transformers import attention_forward
from attn_ops.integrations.transformers_refusals import REFUSED

Model = Callable[[str, str], Any]

MODELS = tuple(CONFIGS)


def plans(run: Callable[[], Any]) -> int:
    """Plans that ``run`` makes."""
    with profile(activities=[ProfilerActivity.CPU]) as measured:
        run()
    return sum(e.count for e in measured.key_averages() if e.key.startswith("attn::plan_"))


@pytest.fixture(params=["host", "device"])
def lengths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where lengths are. Those on a device are not read: plans are shared by the tensors alone."""
    if request.param == "device":
        monkeypatch.setattr(shared_plans, "seen", lambda t: False)
    shared_plans.host_plans().entries.clear()
    return request.param


def counted(counts: dict[str, int], kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[kind] += 1
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, model: Model) -> None:
    ids = tokens()
    torch.testing.assert_close(model(name, "attn_ops")(ids).logits, model(name, "eager")(ids).logits, **TOLERANCE)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_of_one_token_without_a_cache(name: str, batch: int, model: Model) -> None:
    """Strides of a dimension of size 1 are those of rotated keys, or of a view of a layer's values."""
    ids = tokens()[:1, :1].expand(batch, 1)
    expected = model(name, "eager")(ids, use_cache=False).logits
    torch.testing.assert_close(model(name, "attn_ops")(ids, use_cache=False).logits, expected, **TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_padded_batches(name: str, model: Model) -> None:
    ids, mask = padded(tokens())
    expected = model(name, "eager")(ids, attention_mask=mask).logits
    logits = model(name, "attn_ops")(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], **TOLERANCE)
    unpadded = model(name, "attn_ops")(ids[:1, 4:]).logits
    torch.testing.assert_close(logits[:1, 4:], unpadded, **TOLERANCE)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt-oss", "deepseek-v3"])
def test_autocast(name: str, compiled: bool, model: Model) -> None:
    """Rotary embeddings return float32 queries and keys; values have the dtype of autocast."""
    ids, mask = padded(tokens())
    found = model(name, "attn_ops")
    run = torch.compile(found, fullgraph=True, backend="eager") if compiled else found
    with torch.autocast("cpu", torch.bfloat16):
        for more, rows in (({}, mask >= 0), ({"attention_mask": mask}, mask.bool())):
            expected, logits = model(name, "eager")(ids, **more).logits, run(ids, **more).logits
            torch.testing.assert_close(logits[rows], expected[rows], rtol=0.1, atol=0.1 * float(expected.abs().max()))
        if not compiled:
            assert generate(found, ids, mask).shape == generate(model(name, "eager"), ids, mask).shape


def test_padding_on_the_right(model: Model) -> None:
    ids, mask = tokens(), torch.ones_like(tokens())
    mask[1, 6:] = 0
    expected = model("mistral", "eager")(ids, attention_mask=mask).logits
    logits = model("mistral", "attn_ops")(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], **TOLERANCE)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_bidirectional_masks(name: str, right: bool, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """``is_causal=False`` of a config: full attention, and windows on both sides."""
    ids, mask = padded(tokens())
    mask = mask.flip(1) if right else mask
    found = {kind: model(name, kind) for kind in ("eager", "attn_ops")}
    for each in found.values():
        monkeypatch.setattr(each.config, "is_causal", False, raising=False)
    for given, rows in ((None, mask >= 0), (mask, mask.bool())):
        expected = found["eager"](ids, attention_mask=given, use_cache=False).logits[rows]
        if name == "mistral" and given is not None and right:
            with pytest.raises(UnsupportedError, match="pad on the left"):
                found["attn_ops"](ids, attention_mask=given, use_cache=False)
            continue
        logits = found["attn_ops"](ids, attention_mask=given, use_cache=False).logits[rows]
        torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("padded_image", [False, True])
def test_padded_patches(padded_image: bool, compiled: bool, transformers: Any) -> None:
    """SigLIP 2, with heads of 72: images of fewer patches, which it pools by PyTorch's attention with the same mask."""
    sizes = {"hidden_size": 144, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 96}
    config = transformers.Siglip2VisionConfig(**sizes, patch_size=4, num_patches=16)
    torch.manual_seed(0)
    found = transformers.Siglip2VisionModel(config).eval().requires_grad_(False)
    patches, mask = torch.randn(2, 16, 48), torch.ones(2, 16, dtype=torch.int64)
    shapes = torch.tensor([[4, 4], [3 if padded_image else 4, 4]])
    mask[1, int(shapes[1].prod()) :] = 0
    found.set_attn_implementation("eager")
    expected = found(patches, mask, shapes)
    found.set_attn_implementation("attn_ops")
    result = (torch.compile(found, fullgraph=True, backend="eager") if compiled else found)(patches, mask, shapes)
    torch.testing.assert_close(result.pooler_output, expected.pooler_output, **TOLERANCE)
    rows, expected_rows = (each.last_hidden_state[mask.bool()] for each in (result, expected))
    torch.testing.assert_close(rows, expected_rows, **TOLERANCE)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens(name: str, cache: str | None, model: Model) -> None:
    for ids, mask in (padded(tokens()), (tokens(), torch.ones_like(tokens()))):
        expected = generate(model(name, "eager"), ids, mask, cache_implementation=cache)
        assert torch.equal(generate(model(name, "attn_ops"), ids, mask, cache_implementation=cache), expected)
        assert len(set(expected[0].tolist())) > 4


def test_a_chunk_over_a_cache(model: Model) -> None:
    """Several new tokens over a cache, as in speculative decoding."""
    ids, mask = padded(tokens())
    logits = {}
    for implementation in ("eager", "attn_ops"):
        found = model("gemma2", implementation)
        cached = found(ids[:, :5], attention_mask=mask[:, :5]).past_key_values
        logits[implementation] = found(ids[:, 5:], attention_mask=mask, past_key_values=cached).logits
    torch.testing.assert_close(logits["attn_ops"], logits["eager"], **TOLERANCE)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padding", [0, 4])
def test_decoding_absorbs_the_weights_of_latents(
    cache: str | None, padding: int, transformers: Any, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt alone is expanded, once in each of two layers. Tokens are those of the model's own attention."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    found, counts = model("deepseek-v3", "attn_ops"), {"expanded": 0}
    expand = counted(counts, "expanded", DeepseekV3Attention.attn_ops_expand_kv)
    monkeypatch.setattr(DeepseekV3Attention, "attn_ops_expand_kv", expand)
    ids, mask = padded(tokens(), padding)
    expected = generate(model("deepseek-v3", "eager"), ids, mask, cache_implementation=cache)
    assert torch.equal(generate(found, ids, mask, cache_implementation=cache), expected)
    assert counts["expanded"] == 2


class Packed(torch.Tensor):
    """Weights that a layer can multiply by, and that have no heads, as quantized tensors are."""

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert f not in (torch.unflatten, torch.Tensor.unflatten)
        return super().__torch_function__(f, types, args, kwargs)


def test_weights_of_other_types_cannot_be_absorbed(model: Model) -> None:
    found = model("deepseek-v3", "attn_ops")
    projections = [layer.self_attn.kv_b_proj for layer in found.model.layers]
    weights = [each.weight for each in projections]
    with torch.no_grad():
        cached = found(tokens()[:, :-1]).past_key_values
        expected = model("deepseek-v3", "eager")(tokens()).logits[:, -1]
        try:
            for each in projections:
                each.weight = torch.nn.Parameter(each.weight.detach().as_subclass(Packed), requires_grad=False)
            logits = found(tokens()[:, -1:], past_key_values=cached).logits[:, -1]
        finally:
            for each, weight in zip(projections, weights, strict=True):
                each.weight = weight
    torch.testing.assert_close(logits.as_subclass(torch.Tensor), expected, **TOLERANCE)


def test_weights_that_cannot_be_absorbed(model: Model) -> None:
    """Such as quantized ones, for which a subclass of Linear stands."""
    found = model("deepseek-v3", "attn_ops")
    with torch.no_grad():
        cached = found(tokens()[:, :-1]).past_key_values
        expected = model("deepseek-v3", "eager")(tokens()).logits[:, -1]
        projections = [layer.self_attn.kv_b_proj for layer in found.model.layers]
        try:
            for each in projections:
                each.__class__ = type("Quantized", (torch.nn.Linear,), {})
            logits = found(tokens()[:, -1:], past_key_values=cached).logits[:, -1]
        finally:
            for each in projections:
                each.__class__ = torch.nn.Linear
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("given", [False, True])
def test_packed_sequences(given: bool, model: Model) -> None:
    """Sequences in one row, found by their positions or given by their lengths."""
    ids = tokens(1, 9)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])
    lengths = torch.tensor([0, 3, 9], dtype=torch.int32)
    given_lengths = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 6, "max_length_k": 6}
    for name in ("llama", "mistral"):
        found = model(name, "attn_ops")
        more = given_lengths if given else {}
        logits = found(ids, position_ids=positions, use_cache=False, **more).logits
        expected = torch.cat([model(name, "eager")(part).logits for part in ids.split([3, 6], 1)], 1)
        torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "deepseek-v3"])
def test_continuous_batching(name: str, transformers: Any, model: Model) -> None:
    """transformers' paged cache takes no keys and values of different head dims, as DeepSeek's are."""
    prompts = [tokens()[1].tolist(), tokens()[1, :5].tolist(), tokens()[0, 3:].tolist()]
    found = continuous(transformers, model(name, "attn_ops_flash_3"), prompts)
    for prompt in prompts:
        expected = generate(model(name, "eager"), torch.tensor([prompt]))[0, len(prompt) :]
        assert found[tuple(prompt)] == expected.tolist()


@pytest.mark.parametrize("name", [name for name in SHARED_KEYS if name != "gemma3n-full"])
def test_layers_with_the_keys_of_earlier_ones(name: str, transformers: Any, model: Model) -> None:
    """transformers' paged cache does not take Gemma 4, whose layers have different head dims."""
    found, eager = model(name, "attn_ops"), model(name, "eager")
    for ids, mask in (padded(tokens()), (tokens(), torch.ones_like(tokens()))):
        for cache in (None, "static"):
            expected = generate(eager, ids, mask, cache_implementation=cache)
            assert torch.equal(generate(found, ids, mask, cache_implementation=cache), expected)
        for keep in (1, 2, 3):
            logits = [
                each(
                    ids,
                    attention_mask=mask,
                    past_key_values=transformers.StaticCache(config=each.config, max_cache_len=16),
                    logits_to_keep=keep,
                ).logits
                for each in (found, eager)
            ]
            torch.testing.assert_close(*logits, **TOLERANCE)
    if name == "gemma3n":
        prompt = tokens()[1]
        expected = generate(eager, prompt[None])[0, len(prompt) :].tolist()
        assert continuous(transformers, found, [prompt.tolist()]) == {tuple(prompt.tolist()): expected}


def test_continuous_batching_of_a_model_with_the_other_name(
    transformers: Any, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where flash_attn is installed, which transformers prefers to names that it does not know."""
    from transformers.generation.continuous_batching import continuous_api

    from attn_ops.integrations import transformers as integration

    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **_: True)
    counts = {"calls": 0}
    varlen = counted(counts, "calls", integration.flash_attn_varlen_func)
    monkeypatch.setattr(integration, "flash_attn_varlen_func", varlen)
    found, prompt = model("llama", "attn_ops"), tokens()[1].tolist()
    expected = generate(model("llama", "eager"), torch.tensor([prompt]))[0, len(prompt) :]
    assert continuous(transformers, found, [prompt])[tuple(prompt)] == expected.tolist()
    assert counts["calls"] >= 2 * STEPS
    assert found.config._attn_implementation == "attn_ops"


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3n-full"])
def test_block_tables_of_continuous_batching(
    name: str, transformers: Any, model: Model, lengths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of decode steps, which transformers takes for models without windows, and on accelerators alone: it is
    made to believe in one."""
    from transformers.generation.continuous_batching import initialization

    from attn_ops.integrations import transformers as integration

    counts = {"plans": 0, "calls": 0}
    monkeypatch.setattr(BlockTables, "plan", counted(counts, "plans", BlockTables.plan))
    with_cache = counted(counts, "calls", integration.flash_attn_with_kvcache)
    monkeypatch.setattr(integration, "flash_attn_with_kvcache", with_cache)
    monkeypatch.setattr(initialization, "is_torch_xpu_available", lambda: True)
    monkeypatch.setattr(initialization, "is_flash_attention_requested", lambda *_, **__: True)
    prompts = [tokens()[1].tolist(), tokens()[1, :5].tolist(), tokens()[0, 3:].tolist()]
    found = continuous(transformers, model(name, "attn_ops_flash_3"), prompts, max_blocks_per_request=2)
    layers = model(name, "eager").config.num_hidden_layers
    assert layers * (STEPS - 2) <= layers * counts["plans"] <= counts["calls"]
    for prompt in prompts:
        expected = generate(model(name, "eager"), torch.tensor([prompt]))[0, len(prompt) :]
        assert found[tuple(prompt)] == expected.tolist()


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("mistral", 1), ("gemma2", 2), ("gpt-oss", 2)])
def test_layers_share_plans(name: str, kinds: int, model: Model, lengths: str) -> None:
    """With two layers each. One kind is the full layers, the other those with a window."""
    found = model(name, "attn_ops")
    ids, mask = padded(tokens(3, 11), 2)
    more = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    held: list[Any] = []
    assert plans(lambda: held.append(found(ids, attention_mask=mask).past_key_values)) == kinds
    assert plans(lambda: found(ids[:, :1], attention_mask=more, past_key_values=held[0])) == kinds


def test_layers_share_plans_in_continuous_batching(
    transformers: Any, model: Model, lengths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attn_ops.integrations import transformers as integration

    counts = {"plans": 0, "calls": 0}

    monkeypatch.setattr(RaggedLengths, "plan", counted(counts, "plans", RaggedLengths.plan))
    varlen = counted(counts, "calls", integration.flash_attn_varlen_func)
    monkeypatch.setattr(integration, "flash_attn_varlen_func", varlen)
    continuous(transformers, model("llama", "attn_ops_flash_3"), [tokens()[1].tolist(), tokens()[0, :4].tolist()])
    assert 2 * STEPS <= 2 * counts["plans"] <= counts["calls"]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compiled(name: str, model: Model) -> None:
    compiled = torch.compile(model(name, "attn_ops"), fullgraph=True, backend="eager")
    ids, mask = padded(tokens())
    packed = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2), "use_cache": False}
    for more, rows in (({}, mask >= 0), ({"attention_mask": mask}, mask.bool()), (packed, mask >= 0)):
        expected = model(name, "eager")(ids, **more).logits
        torch.testing.assert_close(compiled(ids, **more).logits[rows], expected[rows], **TOLERANCE)


def test_compiled_steps(transformers: Any, model: Model) -> None:
    """No graph is compiled after the second step, whatever the lengths.

    ``tests/benchmarks/test_generate.py`` has steps that Inductor compiles.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    found, graphs = model("llama", "attn_ops"), CompileCounterWithBackend("eager")
    cache = [transformers.StaticCache(config=found.config, max_cache_len=32) for _ in range(2)]
    expected = decode(model("llama", "eager"), model("llama", "eager"), cache[0])
    logits = decode(found, torch.compile(found, fullgraph=True, backend=graphs), cache[1])
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert graphs.frame_count == 1


def test_compiled_steps_without_a_mask(transformers: Any, model: Model) -> None:
    """The sizes of a dynamic cache with a window are symbolic, and so is what the mask is told of them."""
    ids, logits = tokens(), {}
    for implementation in ("eager", "attn_ops"):
        found = model("mistral", implementation)
        run = torch.compile(found, fullgraph=True, backend="eager") if implementation == "attn_ops" else found
        cache = transformers.DynamicCache(config=found.config)
        chunks = ids[:, :4], *ids[:, 4:].split(1, dim=1)
        logits[implementation] = torch.cat([run(chunk, past_key_values=cache).logits for chunk in chunks], 1)
    torch.testing.assert_close(logits["attn_ops"], logits["eager"], **TOLERANCE)


def test_compiled_prompts_of_any_length(model: Model) -> None:
    """A graph of the first length, then one for each size of query tiles."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    found, graphs = model("llama", "attn_ops"), CompileCounterWithBackend("eager")
    compiled = torch.compile(found, fullgraph=True, backend=graphs)
    for length in (9, 5, 20, 33, 50, 64, 100, 17, 150):
        ids = tokens(length=length)
        expected = model("llama", "eager")(ids, use_cache=False).logits
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, **TOLERANCE)
    assert graphs.frame_count <= 4


@pytest.mark.slow
def test_compiled_by_inductor(model: Model) -> None:
    compiled = torch.compile(model("gemma2", "attn_ops"), fullgraph=True)
    ids, mask = padded(tokens())
    expected = model("gemma2", "eager")(ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(compiled(ids, attention_mask=mask).logits[mask.bool()], expected, **TOLERANCE)


# ----------------------------------------------------------------------------------------------------------- refusals


def test_hidden_tokens_between_others(model: Model) -> None:
    mask = torch.ones_like(tokens())
    mask[0, 4] = 0
    with pytest.raises(
        UnsupportedError, match=r"hides tokens between or after those that it shows.*padding_side='left'"
    ):
        model("llama", "attn_ops")(tokens(), attention_mask=mask)


def test_masks_of_compiled_code_are_asserted(transformers: Any, model: Model) -> None:
    """What a mask hides, and functions that are combined into it, are not known while a graph is traced."""
    from transformers.masking_utils import create_causal_mask

    mask = torch.ones_like(tokens())
    mask[0, 4] = 0
    with pytest.raises(RuntimeError, match="hides tokens between"):
        torch.compile(model("llama", "attn_ops"), fullgraph=True, backend="eager")(tokens(), attention_mask=mask)

    config, blocks = model("llama", "attn_ops").config, torch.full((2, 9), 1)

    @torch.compile(fullgraph=True, backend="eager")
    def with_blocks(inputs: Tensor, mask: Tensor) -> Tensor:
        return create_causal_mask(config, inputs, mask, None, block_sequence_ids=blocks)

    with pytest.raises(RuntimeError, match="tokens see later ones"):
        with_blocks(torch.zeros(2, 9, 64), torch.ones(2, 9, dtype=torch.bool))


@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
@pytest.mark.parametrize("compiled", [False, True])
def test_masks_of_fewer_tokens(cache: str | None, compiled: bool, transformers: Any, model: Model) -> None:
    """transformers hides the tokens after the mask if it has a cache, new ones too, and else its backends fail."""
    found, given = model("llama", "attn_ops"), torch.ones_like(tokens())
    run = torch.compile(found, fullgraph=True, backend="eager") if compiled else found
    options: dict[str, Any] = {"use_cache": cache is not None}
    if cache is not None:
        options["past_key_values"] = transformers.StaticCache(config=found.config, max_cache_len=16)
    if cache == "dynamic":
        options["past_key_values"] = transformers.DynamicCache(config=found.config)
    words = r"attention_mask has (8|fewer) tokens.* the tokens of the cache and the new ones"
    with pytest.raises(Exception, match=words) as caught:
        run(tokens(), attention_mask=given[:, :8], **options)
    assert compiled or caught.type is ShapeError
    if cache is not None:
        found(tokens(), attention_mask=given, **options)
        with pytest.raises(ShapeError, match="attention_mask has 1 tokens; expected 10, the tokens of the cache"):
            found(tokens()[:, :1], attention_mask=given[:, :1], **options)


@pytest.mark.parametrize("width", [8, 10])
def test_bidirectional_masks_of_other_tokens(width: int, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    found = model("llama", "attn_ops")
    monkeypatch.setattr(found.config, "is_causal", False, raising=False)
    for given in (torch.ones(2, width), padded(torch.ones(2, width))[1]):
        with pytest.raises(ShapeError, match=f"the mask is for {width} keys; expected 9, as the layer has; pass"):
            found(tokens(), attention_mask=given, use_cache=False)


def test_a_block_table_without_a_paged_cache(model: Model) -> None:
    """As a layer has it that updated no cache, and whose keys are of no earlier layer."""
    layer = torch.nn.Module()
    layer.layer_idx, layer.layer_type = 0, "full_attention"  # type: ignore[assignment]
    lengths = torch.tensor([0, 1, 2], dtype=torch.int32)
    q, k = torch.zeros(1, 4, 2, 16), torch.zeros(1, 2, 2, 16)
    table = torch.zeros(1, 2, 1, dtype=torch.int32)
    given: dict[str, Any] = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": {"full_attention": lengths}}
    with pytest.raises(UnsupportedError, match=r"a layer has no paged cache.*max_blocks_per_request=0"):
        attention_forward(layer, q, k, k, None, block_table=table, **given)


def test_prepared_masks(model: Model) -> None:
    with pytest.raises(UnsupportedError, match=r"attention_mask is \[2, 1, 9, 9\], bool, .*'sdpa'"):
        model("llama", "attn_ops")(tokens(), attention_mask=torch.ones(2, 1, 9, 9, dtype=torch.bool))


def test_gradients(model: Model) -> None:
    found = model("llama", "attn_ops")
    weight = found.model.embed_tokens.weight.requires_grad_(True)
    try:
        with pytest.raises(GradientError, match=r"requires grad.*torch.no_grad\(\)"):
            found(tokens())
        with torch.no_grad():
            found(tokens())
    finally:
        weight.requires_grad_(False)


def test_dropout(model: Model) -> None:
    attention = model("llama", "attn_ops").model.layers[0].self_attn
    attention.attention_dropout = 0.5
    try:
        model("llama", "attn_ops").train()
        with pytest.raises(UnsupportedError, match=r"dropout is 0.5.*model.eval\(\)"):
            model("llama", "attn_ops")(tokens())
    finally:
        model("llama", "attn_ops").eval()
        attention.attention_dropout = 0.0


def test_probabilities(model: Model) -> None:
    with pytest.raises((UnsupportedError, ValueError), match="output_attentions"):
        model("llama", "attn_ops")(tokens(), output_attentions=True)


@pytest.mark.parametrize("setting", ["index_topk", "keep_window_size"])
def test_models_that_select_keys(setting: str, model: Model) -> None:
    found = model("llama", "attn_ops")
    setattr(found.config, setting, 4)
    try:
        with pytest.raises(UnsupportedError, match=rf"\(config.{setting}\) reads the attention mask.*'eager'"):
            found(tokens(), attention_mask=padded(tokens())[1])
    finally:
        delattr(found.config, setting)


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks", "position_bias", "head_mask"])
def test_arguments_of_a_layer_that_would_change_the_result(name: str) -> None:
    x = torch.zeros(1, 2, 3, 16)
    layer = torch.nn.Module()
    layer.is_causal = False  # type: ignore[assignment]
    assert attention_forward(layer, x, x, x, None, **{name: None})[0].shape == (1, 3, 2, 16)
    with pytest.raises(UnsupportedError, match=rf"{name} is given, which is not supported: .*'(eager|sdpa)'"):
        attention_forward(layer, x, x, x, None, **{name: torch.zeros(1, dtype=torch.int32)})


OTHERS = {
    "cu_seq_lens_q",  # taken
    "cu_seq_lens_k",  # taken
    "position_ids",  # what the lengths say too
    "max_length_q",  # what the lengths say too
    "max_length_k",  # what the lengths say too
    "deterministic",  # gradients
}
"""Arguments that need not be parameters of ``attention_forward``."""


def test_no_layer_passes_another_argument(transformers: Any) -> None:
    """An argument that changes the result must be taken or refused: a new release of transformers may add one."""
    known = {*inspect.signature(attention_forward).parameters, *REFUSED, *OTHERS}
    passed = set()
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = file.read_text()
        for call in re.finditer(r"attention_interface\(\n(.*?)\n\s*\)", text, re.DOTALL):
            passed |= set(re.findall(r"^\s*(\w+)=", call[1], re.MULTILINE))
    assert passed >= {"scaling", "dropout", "sliding_window", "indices"}
    assert passed - known == set()


@pytest.mark.parametrize("name", ["attention_alone", "attn_ops_flash_3"])
def test_a_name_without_its_mask_function(name: str, transformers: Any, model: Model) -> None:
    """The second is registered, for continuous batching alone: what to do is the same."""
    if name == "attention_alone":
        transformers.AttentionInterface.register(name, attention_forward)
    with pytest.raises(ArgumentError, match=r"no attention mask.*use the name that .*register\(\) returns"):
        model("llama", name)(tokens(), attention_mask=padded(tokens())[1])


def test_masks_of_other_forms(transformers: Any, model: Model) -> None:
    from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

    config = model("llama", "attn_ops").config
    inputs = {"inputs_embeds": torch.zeros(2, 9, 64), "attention_mask": None, "past_key_values": None}
    with pytest.raises(UnsupportedError, match=r"the mask is made by .*'sdpa'"):
        create_causal_mask(config, **inputs, or_mask_function=lambda b, h, q, k: k >= 0)
    with pytest.raises(UnsupportedError, match=r"the mask is made by .*'sdpa'"):
        create_causal_mask(config, **inputs, or_mask_function=functools.partial(lambda a, b, h, q, k: k >= a, 0))
    config.attention_chunk_size = 4
    try:
        with pytest.raises(UnsupportedError, match=r"the mask is made by .*chunked_overlay.*'sdpa'"):
            create_chunked_causal_mask(config, **inputs)
    finally:
        del config.attention_chunk_size


def test_transformers_is_optional() -> None:
    code = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
import attn_ops
from attn_ops.integrations import transformers
try:
    transformers.register()
except ImportError as error:
    assert "pip install" in str(error) and str(error.__cause__) in str(error), error
else:
    raise AssertionError("nothing raised")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("window", [None, 2])
def test_a_bidirectional_call_without_a_mask(window: int | None) -> None:
    """A window of ``w`` shows ``w`` keys on either side, as transformers' masks do."""
    q, k, v = torch.randn(3, 2, 4, 9, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out, _ = attention_forward(torch.nn.Module(), q, k, v, None, sliding_window=window, is_causal=False)
    at = torch.arange(9)
    visible = (at[:, None] - at[None, :]).abs() <= (9 if window is None else window)
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=visible)
    torch.testing.assert_close(out.transpose(1, 2).double(), expected, rtol=1e-5, atol=1e-5)
