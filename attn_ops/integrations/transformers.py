"""Hugging Face transformers: ``attn_implementation="attn_ops"``. See docs/guide/transformers.md."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from attn_ops.eager.interposition import is_traced
from attn_ops.errors import ShapeError, fail, unsupported
from attn_ops.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from attn_ops.integrations import transformers_mla as mla
from attn_ops.integrations.transformers_cache import grow_in_place
from attn_ops.integrations.transformers_layout import Layout
from attn_ops.integrations.transformers_masks import WHERE, Kind, Step, attention_bounds, is_bounds, no_bounds, step_of
from attn_ops.integrations.transformers_refusals import refuse, refuse_mask

__all__ = ["NAME", "PAGED_NAME", "attention_forward", "register"]

LOG = logging.getLogger(__name__)

NAME = "attn_ops"
"""``attn_implementation`` of models."""

PAGED_NAME = "attn_ops_flash_3"
"""The same in continuous batching, which takes only names with "flash", and block tables only for "flash" and 2 or
3."""


def register() -> str:
    """Register :data:`NAME` and :data:`PAGED_NAME` with transformers: attention and mask functions.

    Returns:
        ``"attn_ops"``, to be passed as ``attn_implementation``.

    Raises:
        ImportError: transformers is not installed, is older than 5.22, or cannot be imported.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers import cache_utils as caches
        from transformers import modeling_flash_attention_utils as flash
        from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
        from transformers.modeling_utils import PreTrainedModel
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
    except ImportError as error:
        raise ImportError(
            f"attn_ops.integrations.transformers needs transformers 5.22 or newer, which was not imported ({error}): "
            'pip install "transformers>=5.22,<6"'
        ) from error

    for name, mask_function in ((NAME, attention_bounds), (PAGED_NAME, no_bounds)):
        AttentionMaskInterface.register(name, mask_function)
        AttentionInterface.register(name, attention_forward)
    if not hasattr(flash._lazy_imports, "attn_ops"):
        flash._lazy_imports = _lazy_imports(flash._lazy_imports)
        models: Any = PreTrainedModel
        models._check_and_adjust_attn_implementation = _adjusted(models._check_and_adjust_attn_implementation)
        managers: Any = ContinuousBatchingManager
        managers.switch_to_cb_friendly_attn = _switched(managers.switch_to_cb_friendly_attn)
        mla.keep_latents(DeepseekV3Attention, NAME)
        grow_in_place(caches.DynamicCache, caches.DynamicLayer, (NAME, PAGED_NAME))
    return NAME


def _lazy_imports(original: Any) -> Any:
    """transformers looks a name with "flash" up among packages and on the hub: find PAGED_NAME here."""

    @functools.wraps(original)
    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation != PAGED_NAME:
            return original(implementation, *args, **kwargs)
        from transformers import modeling_flash_attention_utils as flash

        functions = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
        return *functions, flash._pad_input, flash._unpad_input

    lazy_imports.attn_ops = True  # type: ignore[attr-defined]
    return lazy_imports


def _adjusted(original: Any) -> Any:
    """Models with a list of flash implementations, such as gpt-oss, replace names that are not on it.

    Models whose attention does not look the name up, such as BLOOM, keep their own attention and masks, as by
    ``set_attn_implementation``.
    """

    @functools.wraps(original)
    def check_and_adjust(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if attn_implementation in (NAME, PAGED_NAME) and _has_own_attention(type(self)):
            LOG.warning("%s has attention of its own, and keeps it", type(self).__name__)
            return original(self, None, *args, **kwargs)
        if attn_implementation == PAGED_NAME:
            return PAGED_NAME
        return original(self, attn_implementation, *args, **kwargs)

    return check_and_adjust


def _has_own_attention(kind: type) -> bool:
    """Whether the attention of this type of model, or of those that it derives from, does not look the name up."""
    from transformers.modeling_utils import PreTrainedModel

    bases = [base for base in kind.__mro__ if issubclass(base, PreTrainedModel) and base is not PreTrainedModel]
    return {_looks_up_attention(base) for base in bases} - {None} == {False}


def _looks_up_attention(kind: Any) -> bool | None:
    """Whether the source of a type of model looks attention up by name; None without source, as in a notebook."""
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (KeyError, OSError, TypeError):
        return None
    # transformers looks for one form of it: models of others may have another.
    return bool(kind._can_set_attn_implementation()) or "ALL_ATTENTION_FUNCTIONS" in source


def _switched(original: Any) -> Any:
    """Continuous batching refuses NAME, or takes an installed flash_attn instead: give it PAGED_NAME until it stops."""

    @functools.wraps(original)
    def switch(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if model.config._attn_implementation == NAME:
            model.set_attn_implementation(PAGED_NAME)
            self._original_attn_impl = NAME  # which the manager sets when it stops
        return original(self, model, *args, **kwargs)

    return switch


# ----------------------------------------------------------------------------------------------------------- attention


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, as transformers' models call it.

    Args:
        query: ``[batch, num_heads, seqlen_q, head_dim]``.
        key, value: ``[batch, num_kv_heads, seqlen_k, head_dim]``, all that the cache holds; of DeepSeek-V3,
            rotary parts and latents ``[batch, 1, seqlen_k, *]``.
        attention_mask: of :func:`attn_ops.integrations.transformers_masks.attention_bounds`, which decides what is
            seen. Without a mask ``sliding_window`` and ``is_causal`` decide.
        scaling, softcap: of the logits. ``s_aux``: ``[num_heads]``, attention sinks.
        cache: the paged cache of continuous batching, before transformers 5.24. Since then models update it themselves,
            and ``kwargs`` have what the update adds: lengths, and of decode steps a block table.

    Returns:
        ``out [batch, seqlen_q, num_heads, head_dim]``, and None for the probabilities, which are never stored.

    Raises:
        UnsupportedError: dropout, ``output_attentions``, ``head_mask``, a bias, keys that the model selects, a sink of
            each token, or a mask that is not of the registered mask function.
        GradientError: gradients are recorded, and a tensor requires them.
        ArgumentError: a causal layer has no mask.
    """
    refuse(kwargs, query, key, value)
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "s_aux": None if s_aux is None else s_aux.detach().float(),
    }
    bounded = is_bounds(attention_mask)
    if mla.has_latents(module, query, key):
        if query.shape[2] > 1 or not bounded:
            key, value = mla.expand(module, key, value)
        else:
            query, options["qv"] = mla.absorb(module, query)
    if "qv" in options:
        query, key, value, options["qv"] = _autocast(query, key, value, options["qv"])
    else:
        query, key, value = _autocast(query, key, value)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if cache is not None or "block_table" in kwargs:
        return _continuous(module, query, key, value, cache, causal, sliding_window, options, kwargs), None
    if kwargs.get("cu_seq_lens_q") is not None and kwargs.get("cu_seq_lens_k") is not None:
        lengths = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
        window = _window(sliding_window, causal)
        plans: AbstractContextManager[object] = nullcontext()
        if bounded and attention_mask is not None:
            window, plans = Kind.of(attention_mask).window_size, step_of(attention_mask).plans()
        with plans:
            return _packed(query, key, value, lengths, causal, window, options), None
    if attention_mask is None and not causal:
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return flash_attn_func(q, k, v, window_size=_window(sliding_window, causal), **options), None
    if not bounded:
        refuse_mask(attention_mask)
    assert attention_mask is not None
    out = _bounded(module, query, key, value, attention_mask, options)
    return (mla.project(module, out) if "qv" in options else out), None


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in one dtype: under autocast, projections have its dtype, and rotary embeddings return float32."""
    device = tensors[0].device.type
    if len({t.dtype for t in tensors}) == 1 or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) for t in tensors)


def _window(sliding_window: int | None, causal: bool) -> tuple[int, int]:
    """transformers counts the row itself if a layer is causal, FlashAttention never does."""
    if sliding_window is None:
        return -1, -1
    return (sliding_window - 1, -1) if causal else (sliding_window, sliding_window)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[Tensor, Tensor],
    causal: bool,
    window: tuple[int, int],
    options: dict[str, Any],
) -> Tensor:
    """Sequences of given cumulative lengths, of the rows of all requests."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    out = flash_attn_varlen_func(q, k, v, *lengths, causal=causal, window_size=window, **options)
    rows: Tensor = torch.unflatten(out, 0, (query.shape[0], query.shape[2]))
    return rows


def _bounded(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    """Requests whose keys lie between bounds in their row of the cache."""
    step = step_of(mask)
    kind = step.kind
    assert kind is not None
    if kind.packed:
        if "packed" not in step.tables:
            lengths = torch.nn.functional.pad(mask[:, 0, 0, 1], (1, 0))
            step.tables["packed"] = lengths, lengths
        with step.plans():
            return _packed(query, key, value, step.tables["packed"], kind.causal, kind.window_size, options)
    rows = query.shape[2]
    # Of a static cache. A layer that has the keys of an earlier one may compute only the last rows.
    prompt = kind.prompt and not getattr(module, "is_kv_shared_layer", False)
    if prompt or (rows > 1 and not (kind.partial or kind.padded)):
        _check_sizes(query, key, mask, step.kv_length)
        if prompt:
            key, value = key[:, :, :rows], value[:, :, :rows]
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        out: Tensor = flash_attn_func(q, k, v, causal=kind.causal, window_size=kind.window_size, **options)
        return out
    form = (query.shape, key.shape, key.stride(), value.shape, value.stride())
    layout = None if is_traced() else step.layouts.get(form)
    if layout is None:
        _check_sizes(query, key, mask, step.kv_length)
        layout = Layout.of(query, (key, value), mask, kind, options)
        if not is_traced():
            step.layouts[form] = layout
    return layout.attend(query, key, value, options)


def _check_sizes(query: Tensor, key: Tensor, mask: Tensor, kv_length: int | None) -> None:
    """Raise unless the mask is for the query's requests and, if ``kv_length`` is known, for that number of keys."""
    if mask.shape[0] != query.shape[0]:
        shown, expected = f"the mask is for {mask.shape[0]} requests", f"{query.shape[0]}, as the query"
        fail(ShapeError, WHERE, shown, expected, "repeat it")
    if kv_length is not None and kv_length != key.shape[2]:
        shown, expected = f"the mask is for {kv_length} keys", f"{key.shape[2]}, as the layer has"
        fail(ShapeError, WHERE, shown, expected, "pass an attention_mask with all tokens")


def _continuous(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    causal: bool,
    sliding_window: int | None,
    options: dict[str, Any],
    kwargs: dict[str, Any],
) -> Tensor:
    """A step of continuous batching: requests in one row, over transformers' paged cache."""
    if cache is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    window, seqlens_k = _window(sliding_window, causal), kwargs["cu_seq_lens_k"]
    if isinstance(seqlens_k, dict):  # by kind of layer: one that has the keys of an earlier layer updates no cache
        seqlens_k = seqlens_k[module.layer_type].int()
    lengths, table = (kwargs["cu_seq_lens_q"], seqlens_k), kwargs.get("block_table")
    step = _step_of(lengths[0] if cache is None else cache, module.layer_idx)
    with step.plans():
        if table is None:
            return _packed(query, key, value, lengths, causal, window, options)
        q, k, v = (t.transpose(1, 2).flatten(0, 1)[:, None] for t in (query, key, value))
        k_cache, v_cache, rows, before = _paged(module, key, value, step, table, seqlens_k, kwargs)
        out = flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            cache_seqlens=before,
            block_table=rows,
            causal=causal,
            window_size=window,
            **options,
        )
    result: Tensor = out.transpose(0, 1)
    return result


def _paged(
    module: Any, key: Tensor, value: Tensor, step: Step, table: Tensor, seqlens_k: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """The caches of a layer, its block table and the lengths before the step, which appends one token to each request.

    A layer with the keys of an earlier one updates no cache: it has that layer's, and appends the same tokens again.
    """
    kind = getattr(module, "layer_type", None)
    if kwargs.get("k_cache") is not None:
        form = None if is_traced() else (table.data_ptr(), seqlens_k.data_ptr(), key.shape[2])
        if form not in step.tables:
            step.tables[form] = table[: key.shape[2]], (seqlens_k.diff() - 1)[: key.shape[2]]
        step.paged[kind] = key, value, kwargs["k_cache"], kwargs["v_cache"], *step.tables[form]
    found = step.paged.get(kind, (None, None))
    if found[0] is not key or found[1] is not value:
        what = "a layer has no paged cache, and no earlier layer of its type in this step has its keys"
        unsupported(WHERE, what, "pass ContinuousBatchingConfig(max_blocks_per_request=0)")
    return found[2:]


def _step_of(shared: Any, layer: int) -> Step:
    """What the layers of a step share, stored at the object ``shared``, which transformers passes to all of them.

    A step begins with a layer whose index is not higher than that of the layer before it.
    """
    step = getattr(shared, "attn_ops_step", None)
    if step is None or layer <= step.last_layer or is_traced():
        step = Step()
        if not is_traced():
            shared.attn_ops_step = step
    step.last_layer = layer
    return step
