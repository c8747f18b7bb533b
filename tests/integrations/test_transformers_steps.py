"""What a step of generation does on the host, beside the results that test_transformers.py compares."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import fake_driver as f
from helpers.fake_driver import FakeDriver
from helpers.transformers_models import TOLERANCE, generate, padded, tokens
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from attn_ops.eager import op_cache
from attn_ops.eager.captured_call import CapturedCall, outputs_of
from attn_ops.eager.extension import is_available, unavailable_reason
from attn_ops.eager.op_cache import OpCache
from attn_ops.eager.op_call import flatten_tensors
from attn_ops.frontend import shared_plans
from attn_ops.frontend.flash import arguments, metadata
from attn_ops.integrations import transformers_plans as plans
from attn_ops.integrations.transformers_cache import CAPACITY_STEP

Model = Callable[..., Any]


def dispatched(call: Callable[[], Any]) -> list[str]:
    """Names of the ops that ``call`` dispatches, but not those within other ops, and no views."""
    with profile(activities=[ProfilerActivity.CPU]) as measured:
        call()
    names = [event.name for event in measured.events() if event.cpu_parent is None and "::" in event.name]
    return [name for name in names if name.removeprefix("aten::") not in VIEWS]


VIEWS = {"transpose", "as_strided", "view", "expand", "squeeze", "select", "slice", "alias", "detach", "unsqueeze"}
VIEWS |= {"flatten", "reshape"}


@pytest.fixture
def layer(transformers: Any) -> Any:
    """``layer(q, k, v, mask)``: the attention of a layer."""
    from attn_ops.integrations.transformers import attention_forward

    return lambda q, k, v, mask: attention_forward(torch.nn.Module(), q, k, v, mask, scaling=0.3)[0]


def bounds(
    batch: int,
    kv_length: int,
    q_length: int = 1,
    padding: int = 0,
    given: Tensor | None = None,
    offset: int | None = None,
) -> Tensor:
    """Of rows at ``offset``, default the end of a cache of ``kv_length`` tokens."""
    from transformers.masking_utils import causal_mask_function

    from attn_ops.integrations.transformers_masks import attention_bounds

    if given is None:
        given = torch.ones(batch, kv_length, dtype=torch.bool)
        given[0, :padding] = False
    if offset is None:
        offset = kv_length - q_length
    return attention_bounds(batch, q_length, kv_length, offset, 0, causal_mask_function, given, device="cpu")


def qkv(batch: int, kv_length: int, q_length: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, q_length, 4, 16).transpose(1, 2)
    return q, *torch.randn(2, batch, 2, kv_length, 16).unbind()


@pytest.mark.parametrize("padding", [0, 3])
def test_layers_after_the_first_dispatch_one_op(padding: int, layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the allocation of scratch memory: nothing is copied, planned or read."""
    for module in (metadata, shared_plans):  # page numbers on the host are checked in every layer
        monkeypatch.setattr(module, "seen", lambda _: False)
    mask = bounds(2, 9, padding=padding)
    q, k, v = qkv(2, 9)
    with torch.no_grad():
        layer(q, k, v, mask)
        found = dispatched(lambda: layer(q, k, v, mask))
    assert found == ["aten::empty", "attn::batch_decode"]


def test_a_mask_without_padding_reads_one_number() -> None:
    """Whether the given mask is all ones."""
    given = torch.ones(2, 9, dtype=torch.bool)
    found = dispatched(lambda: bounds(2, 9, given=given))
    assert found == ["aten::full", "aten::zeros_like", "aten::all", "aten::is_nonzero", "aten::stack", "aten::to"]
    assert bounds(2, 9)[:, 0, 0].tolist() == [[0, 9], [0, 9]]


@pytest.fixture
def steps(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, int]]:
    """``steps(call)``: runs of the body of a function of FlashAttention, and launches of prepared calls. Tensors say
    that they are on CUDA, where ``batch_decode`` launches a kernel."""
    if not is_available():
        pytest.skip(unavailable_reason)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    image, bodies, options = f.load(), [0], arguments.options

    def first_call(args: Any, kwargs: Any) -> Any:
        result = torch.ops.attn.batch_decode(*args, **kwargs)
        found = flatten_tensors(args)
        return result, CapturedCall([f.launched(image, found[0], found[-1])], outputs_of(result))

    def count(*args: Any, **kwargs: Any) -> Any:
        bodies[0] += 1
        return options(*args, **kwargs)

    monkeypatch.setitem(op_cache.OP_CACHES, "batch_decode", OpCache("batch_decode", f.unchecked, first_call))
    monkeypatch.setattr(arguments, "options", count)
    plans._free.plans.clear()

    def during(call: Callable[[], Any]) -> tuple[int, int]:
        before = bodies[0], fake_driver.get("launches")
        call()
        return bodies[0] - before[0], fake_driver.get("launches") - before[1]

    return during


def growing(transformers: Any, length: int) -> Any:
    """A dynamic cache of one layer for a model with this attention, with so many tokens."""
    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    config._attn_implementation = "attn_ops"
    cache = transformers.DynamicCache(config=config)
    cache.update(*torch.randn(2, 2, 2, length, 16).unbind(), 0)
    return cache


def test_steps_launch_what_the_first_did(transformers: Any, layer: Any, steps: Any) -> None:
    """Each layer of a step, and each step while the cache has room: in Python the first layer of the first step."""
    held, q = growing(transformers, 9), qkv(2, 1)[0]

    def step() -> None:
        k, v = held.update(*torch.randn(2, 2, 2, 1, 16).unbind(), 0)
        mask = bounds(2, k.shape[2])
        for _ in range(3):
            layer(q, k, v, mask)

    with torch.no_grad():
        assert steps(step) == (1, 2)
        for _ in range(5):
            assert steps(step) == (0, 3)


def test_steps_over_static_caches_of_all_sizes_have_pages_of_one_size(layer: Any, steps: Any) -> None:
    """Kernels for CUDA are compiled for it."""
    with torch.no_grad():
        for capacity in (12, 20):
            q, k, v = qkv(2, capacity)
            mask = bounds(2, capacity, given=torch.ones(2, 9, dtype=torch.bool), offset=8)
            assert steps(lambda: layer(q, k, v, mask)) == (1, 0)  # noqa: B023
            assert steps(lambda: layer(q, k, v, mask)) == (0, 1)  # noqa: B023
            (layout,) = mask.attn_ops_step.layouts.values()  # type: ignore[attr-defined]
            assert layout.caches(k, v)[0].shape[1] == 1


@pytest.mark.parametrize("padding", [0, 3])
def test_a_prompt_over_a_static_cache(padding: int, layer: Any) -> None:
    q, k, v = qkv(2, 12, 9)
    given = torch.ones(2, 9, dtype=torch.bool)
    given[0, :padding] = False
    k[:, :, 9:], v[:, :, 9:] = float("nan"), float("nan")
    with torch.no_grad():
        mask = bounds(2, 12, 9, given=given, offset=0)
        assert mask.attn_ops_step.kind.prompt == (padding == 0)  # type: ignore[attr-defined]
        out = layer(q, k, v, mask)
        seen = given[:, None, None, :] & torch.ones(9, 9, dtype=torch.bool).tril()
        keys, values = (t[:, :, :9].repeat_interleave(2, 1).double() for t in (k, v))
        want = torch.nn.functional.scaled_dot_product_attention(q.double(), keys, values, attn_mask=seen, scale=0.3)
    torch.testing.assert_close(
        out.transpose(1, 2)[given[:, None].expand(-1, 4, -1)].double(),
        want[given[:, None].expand(-1, 4, -1)],
        rtol=1e-5,
        atol=1e-5,
    )


def test_plans_are_written_again_when_their_step_has_ended(transformers: Any, layer: Any, steps: Any) -> None:
    """Two steps at the same time have plans of their own, and results that do not depend on that."""
    q, k, v = qkv(2, 9)
    masks = [bounds(2, 9), bounds(2, 9, padding=3)]
    with torch.no_grad():
        for mask in masks:
            layer(q, k, v, mask)
        found = [mask.attn_ops_step.layouts.popitem()[1].lease for mask in masks]  # type: ignore[attr-defined]
        assert found[0].metadata.plan.work.data_ptr() != found[1].metadata.plan.work.data_ptr()
        first = found[0].metadata.plan.work.data_ptr()
        del found, mask, masks
        assert sum(map(len, plans._free.plans.values())) == 2
        mask = bounds(2, 9)
        layer(q, k, v, mask)
        assert mask.attn_ops_step.layouts.popitem()[1].lease.metadata.plan.work.data_ptr() == first  # type: ignore[attr-defined]


def test_free_plans_are_bounded(layer: Any, steps: Any) -> None:
    with torch.no_grad():
        for batch in range(1, 3 * plans.MAX_SIZES):
            layer(*qkv(batch, 9), bounds(batch, 9))
            assert len(plans._free.plans) <= plans.MAX_SIZES


# --------------------------------------------------------------------------------------------------------------- caches


def test_a_cache_grows_in_place(transformers: Any) -> None:
    cache = growing(transformers, 9)
    memory = {t.data_ptr() for t in (cache.layers[0].keys, cache.layers[0].values)}
    want = [cache.layers[0].keys.clone(), cache.layers[0].values.clone()]
    for _ in range(CAPACITY_STEP - 9):
        new = torch.randn(2, 2, 2, 1, 16).unbind()
        want = [torch.cat(pair, 2) for pair in zip(want, new, strict=True)]
        held = cache.update(*new, 0)
        assert {t.data_ptr() for t in held} == memory
        assert held[0].stride() == (2 * CAPACITY_STEP * 16, CAPACITY_STEP * 16, 16, 1)
        assert all(map(torch.equal, held, want))
    assert cache.get_seq_length() == CAPACITY_STEP
    held = cache.update(*torch.randn(2, 2, 2, 1, 16).unbind(), 0)
    assert all(torch.equal(t[:, :, :-1], kept) for t, kept in zip(held, want, strict=True))
    assert {t.data_ptr() for t in held}.isdisjoint(memory)


def test_a_long_generation_copies_each_token_a_few_times(transformers: Any) -> None:
    """Buffers grow in proportion: the tokens copied to new ones are within 9 times those held at the end."""
    cache, new, copied = growing(transformers, 9), torch.zeros(2, 2, 1, 16), 0
    for length in range(9, 40 * CAPACITY_STEP):
        memory = cache.layers[0].keys.data_ptr()
        held, _ = cache.update(new, new, 0)
        copied += length * (held.data_ptr() != memory)
    assert cache.get_seq_length() == 40 * CAPACITY_STEP
    assert copied <= 9 * 40 * CAPACITY_STEP


CHANGES: dict[str, Callable[[Any], Any]] = {
    "crop": lambda cache: cache.crop(-4),
    "reorder_cache": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "batch_select_indices": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "batch_repeat_interleave": lambda cache: cache.batch_repeat_interleave(3),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_that_was_changed_goes_on(change: str, transformers: Any) -> None:
    """As transformers' own, which concatenates."""
    cache, plain = growing(transformers, 9), transformers.DynamicCache()
    plain.update(cache.layers[0].keys.clone(), cache.layers[0].values.clone(), 0)
    saved = copy.deepcopy(cache)
    for each in (cache, plain):
        CHANGES[change](each)
    for _ in range(3):
        batch = max(1, cache.layers[0].keys.shape[0]) if cache.layers[0].is_initialized else 2
        new = torch.randn(2, batch, 2, 1, 16).unbind()
        for ours, theirs in zip(cache.update(*new, 0), plain.update(*new, 0), strict=True):
            assert torch.equal(ours, theirs)
    assert saved.get_seq_length() == 9


def test_a_copy_of_a_cache_has_memory_of_its_own(transformers: Any) -> None:
    cache = growing(transformers, 9)
    other = copy.deepcopy(cache)
    new = torch.randn(2, 2, 2, 1, 16).unbind()
    first = [t.clone() for t in cache.update(*new, 0)]
    other.update(*(t + 1 for t in new), 0)
    assert all(map(torch.equal, first, (cache.layers[0].keys, cache.layers[0].values)))
    assert torch.equal(other.layers[0].keys[:, :, -1:], new[0] + 1)


def test_a_fork_of_a_cache_appends_to_memory_of_its_own(transformers: Any) -> None:
    """A shallow copy of its layers shares the tokens so far."""
    cache = growing(transformers, 9)
    fork = copy.copy(cache)
    fork.layers = [copy.copy(layer) for layer in cache.layers]
    assert fork.layers[0].keys is cache.layers[0].keys
    new = torch.randn(2, 2, 2, 1, 16).unbind()
    first = [t.clone() for t in cache.update(*new, 0)]
    second = [t.clone() for t in fork.update(*(t + 1 for t in new), 0)]
    assert all(map(torch.equal, first, (cache.layers[0].keys, cache.layers[0].values)))
    assert torch.equal(second[0][:, :, :-1], first[0][:, :, :-1])
    assert torch.equal(second[0][:, :, -1:], new[0] + 1)


def test_a_cache_is_saved_as_a_layer_of_transformers(transformers: Any) -> None:
    from transformers.cache_utils import DynamicLayer

    cache = growing(transformers, 9)
    for read in (pickle.loads(pickle.dumps(cache)), torch.load(_saved(cache), weights_only=False)):
        (layer,) = read.layers
        assert type(layer) is DynamicLayer
        assert torch.equal(layer.keys, cache.layers[0].keys)
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes
        assert read.update(*torch.randn(2, 2, 2, 1, 16).unbind(), 0)[0].shape[2] == 10


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_a_cache_of_inference_mode_is_used_outside_of_it(transformers: Any) -> None:
    with torch.inference_mode():
        cache = growing(transformers, 9)
    with torch.no_grad():
        keys, _ = cache.update(*torch.randn(2, 2, 2, 1, 16).unbind(), 0)
    assert keys.shape[2] == 10
    assert not keys.is_inference()


def test_caches_of_other_models_are_left_alone(transformers: Any) -> None:
    from transformers.cache_utils import DynamicLayer

    config = transformers.LlamaConfig(num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    for cache in (transformers.DynamicCache(config=config), transformers.DynamicCache()):
        cache.update(*torch.randn(2, 2, 2, 9, 16).unbind(), 0)
        assert type(cache.layers[0]) is DynamicLayer
    config._attn_implementation = "attn_ops"
    offloaded = transformers.DynamicCache(config=config, offloading=True) if torch.cuda.is_available() else None
    assert offloaded is None or type(offloaded.layers[0]) is DynamicLayer


def test_generation_beyond_the_room_of_a_cache(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_ops.integrations import transformers_cache

    monkeypatch.setattr(transformers_cache, "CAPACITY_STEP", 4)
    for ids, mask in (padded(tokens()), (tokens(), None)):
        expected = generate(model("llama", "eager"), ids, mask)
        assert torch.equal(generate(model("llama", "attn_ops"), ids, mask), expected)


def test_beams(model: Model) -> None:
    """Whose caches are reordered in every step."""
    found = [generate(model("llama", kind), tokens(), num_beams=3) for kind in ("eager", "attn_ops")]
    assert torch.equal(*found)


# ----------------------------------------------------------------------------------------------------- compiled steps


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_compiled_steps_copy_no_cache(name: str, transformers: Any, model: Model) -> None:
    """Of a static cache, whose requests may begin with padding."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    sizes: list[tuple[str, tuple[int, ...]]] = []

    def collect(graph: Any, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target.__name__.startswith(("clone", "_to_copy", "copy")):
                value = node.meta.get("val")
                sizes.append((str(node.target), tuple(value.shape) if isinstance(value, Tensor) else ()))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    found, eager, (ids, mask) = model(name, "attn_ops"), model(name, "eager"), padded(tokens())
    caches = [transformers.StaticCache(config=found.config, max_cache_len=32) for _ in range(2)]
    compiled = torch.compile(found, fullgraph=True, backend=aot_autograd(fw_compiler=collect))
    logits = []
    with torch.no_grad():
        for prompt, step, held in ((eager, eager, caches[0]), (found, compiled, caches[1])):
            prompt(ids, attention_mask=mask, past_key_values=held)
            whole = torch.nn.functional.pad(mask, (0, 1), value=1)
            positions, whole = whole.cumsum(1)[:, -1:] - 1, torch.nn.functional.pad(whole, (0, 22))
            given = {"attention_mask": whole, "position_ids": positions, "past_key_values": held}
            logits.append(step(ids[:, -1:], **given).logits)
    assert sizes
    assert [shape for _, shape in sizes if 32 in shape and len(shape) > 2] == []
    torch.testing.assert_close(logits[1], logits[0], **TOLERANCE)


def test_compiled_steps_over_a_cache_that_grew_in_place(model: Model) -> None:
    """In a graph it concatenates, and goes on in place after it."""
    torch._dynamo.reset()
    found, eager, ids = model("llama", "attn_ops"), model("llama", "eager"), tokens()
    compiled = torch.compile(found, fullgraph=True, backend="eager")
    with torch.no_grad():
        held = found(ids[:, :6]).past_key_values
        assert held.layers[0].buffers is not None
        logits = [step(ids[:, i : i + 1], past_key_values=held).logits for i, step in ((6, compiled), (7, found))]
        want = eager(ids[:, :8]).logits
    assert held.layers[0].keys.shape[2] == 8
    torch.testing.assert_close(torch.cat(logits, 1), want[:, 6:], **TOLERANCE)
