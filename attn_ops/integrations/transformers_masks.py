"""What transformers' mask functions describe, as bounds on the keys of each request.

transformers asks a mask function once per step and kind of layer, and passes the result to every such layer. Here the
result is an int32 tensor of four dimensions, as a prepared mask has, so that transformers passes it on as it is:

``[batch, 1 + code, 1, 2]``: ``[b, :, 0]`` are the first key of request b and the key after its last.
``[sequences, 1 + code, 1, 2]`` of a packed row: where each sequence begins and ends.

``code`` is the size of a dimension without data (its stride is 0), so that it is known while a graph is traced. The
bounds are those of all rows: a model that takes the last rows of a mask, ``mask[:, :, -rows:]``, gets them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.eager.interposition import is_traced
from attn_ops.errors import ShapeError, fail, unsupported
from attn_ops.frontend.shared_plans import SharedPlans, active_blocks

WHERE = "attn_implementation='attn_ops'"

_MASKS = {
    "and_masks",
    "bidirectional_mask_function",
    "causal_mask_function",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
    "sliding_window_bidirectional_overlay",
    "sliding_window_overlay",
}
"""Functions in transformers/masking_utils.py whose patterns are supported."""

_SPARSE = {"index_topk": "DeepSeek sparse attention", "keep_window_size": "dynamic mask attention"}
"""Attention to selected keys, which reads the mask to select them, by the setting that such models have."""

_READERS = {"bigbird_pegasus", "nllb-moe"}
"""Other types of encoder-decoder models whose own code reads the mask. The code of a decoder-only model does not."""

_POOLING = {"siglip2_vision_model"}
"""Types of models that pool all rows to one by attention of their own, PyTorch's. It takes a mask of booleans."""


class Step:
    """What the layers of one step share.

    kind        the kind of the mask that the layers are passed, None without a mask
    kv_length   the number of keys that the mask is for, None if it is unknown
    layouts     how the layers read their caches, by sizes and strides
    tables      lengths and page tables of packed rows and of continuous batching
    paged       of the last layer of each type: new keys and values, paged caches, block table and lengths before them
    last_layer  index of the last layer of continuous batching that has used this object
    """

    def __init__(self, kind: Kind | None = None, kv_length: int | None = None) -> None:
        self.kind, self.kv_length = kind, kv_length
        self.layouts: dict[Any, Any] = {}
        self.tables: dict[Any, tuple[Tensor, Tensor]] = {}
        self.paged: dict[str | None, tuple[Tensor, ...]] = {}
        self.last_layer = -1
        self._plans: SharedPlans | None = None

    def plans(self) -> AbstractContextManager[object]:
        """A block for each layer in turn. Its plans last as long as this object: their tensors are in ``tables``."""
        if is_traced():  # the compiler finds equal plans
            return nullcontext()
        if self._plans is None:
            self._plans = _LastingPlans()
        return self._plans


class _LastingPlans(SharedPlans):
    """Shared plans of a step, which the end of a block does not drop."""

    def __exit__(self, *_: object) -> None:
        active_blocks().pop()


class Kind(NamedTuple):
    """The static part of a mask.

    causal   row i sees no key after its own position
    partial  requests end before the last key of the cache
    padded   requests may begin after the first key
    packed   the bounds are those of sequences in one row
    prompt   partial, and the cache has only the keys of the rows, which are its first
    window   keys before the row's position that it sees, and itself (after it too, if not causal); 0 for all
    """

    causal: bool
    partial: bool = False
    padded: bool = False
    packed: bool = False
    prompt: bool = False
    window: int = 0

    @classmethod
    def of(cls, mask: Tensor) -> Kind:
        code = mask.shape[1] - 1
        partial, padded, packed, prompt = (code // bit % 2 == 1 for bit in (2, 4, 8, 16))
        return cls(code % 2 == 0, partial, padded, packed, prompt, code // 32)

    def mask(self, begin: Tensor, end: Tensor, kv_length: int) -> Tensor:
        flags = not self.causal, self.partial, self.padded, self.packed, self.prompt  # of sizes: a SymBool
        code = sum(1 << bit for bit, flag in enumerate(flags) if flag) + 32 * self.window
        bounds = torch.stack((begin, end), 1).int()
        mask = bounds.view(-1, 1, 1, 2).expand(-1, 1 + code, -1, -1)
        mask.attn_ops_step = Step(self, kv_length)  # type: ignore[attr-defined]
        return mask

    @property
    def window_size(self) -> tuple[int, int]:
        if not self.window:
            return (-1, -1)
        return (self.window - 1, 0) if self.causal else (self.window, self.window)


def is_bounds(mask: Any) -> bool:
    """Whether ``mask`` is a result of :func:`attention_bounds`."""
    if hasattr(mask, "attn_ops_step"):
        return True
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[2:] == (1, 2)


def step_of(mask: Tensor) -> Step:
    """What layers that are passed this ``mask`` share. A copy of it, as on another device, has its own."""
    if not hasattr(mask, "attn_ops_step"):
        mask.attn_ops_step = Step(Kind.of(mask))  # type: ignore[attr-defined]
    step: Step = mask.attn_ops_step  # type: ignore[attr-defined]
    return step


def attention_bounds(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    *,
    config: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    device: Any = None,
    **_: Any,
) -> Tensor:
    """A mask function for ``AttentionMaskInterface``, with transformers' arguments.

    Raises:
        UnsupportedError: the mask is not a causal or bidirectional one, with a window, left padding or packed
            sequences; or the model's own code reads it.
        ShapeError: the mask is causal, and ``attention_mask`` has fewer tokens than the cache after the step.
    """
    assert mask_function is not None
    causal = allow_is_bidirectional_skip is None  # which transformers passes only for bidirectional masks
    names = _supported_names(mask_function, config, local_size, use_vmap)
    if q_length == 1 and attention_mask is not None and getattr(config, "model_type", None) in _POOLING:
        return attention_mask[:, None, None].bool()
    window = local_size or 0
    if causal and is_traced() and not allow_is_causal_skip and q_length > 1:
        _assert_causal(mask_function, batch_size, q_length, kv_length, q_offset, device)
    packed = causal and attention_mask is None and not allow_is_causal_skip and isinstance(q_offset, int)
    packed = packed and ("packed_sequence_mask_function" in names or (is_traced() and q_length > 1))
    if packed and q_length == kv_length and q_offset == 0 and kv_offset == 0:
        begin, end = _sequences(mask_function, batch_size, q_length, device)
        return Kind(causal=True, partial=True, padded=True, packed=True, window=window).mask(begin, end, kv_length)
    total = q_offset + q_length - kv_offset if causal else kv_length
    if causal and attention_mask is not None and (isinstance(total, int) or is_traced()):
        _check_tokens(attention_mask, kv_offset + total)
    full = isinstance(total, int) and total == kv_length
    if isinstance(total, int):
        end = torch.full((batch_size,), total, dtype=torch.int32, device=device)
    else:
        end = torch.zeros((batch_size,), dtype=torch.int32, device=device) + total
    begin = torch.zeros_like(end)
    if attention_mask is None or _shows_all(attention_mask, total, kv_offset):
        prompt = isinstance(total, int) and kv_offset == 0 and q_length == total < kv_length
        return Kind(causal, partial=not full, prompt=prompt, window=window).mask(begin, end, kv_length)
    begin, end, padded = _padding(attention_mask, end, kv_offset, causal, window)
    return Kind(causal, partial=padded or not full, padded=padded, window=window).mask(begin, end, kv_length)


def no_bounds(
    *_: Any,
    mask_function: Callable[..., Any],
    config: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **__: Any,
) -> None:
    """A mask function for continuous batching, whose layers are passed lengths: it reads nothing on the device, so that
    a step can be captured in a CUDA graph.

    Raises:
        UnsupportedError: as :func:`attention_bounds`.
    """
    _supported_names(mask_function, config, local_size, use_vmap)


def _supported_names(function: Callable[..., Any], config: Any, local_size: int | None, use_vmap: bool) -> set[str]:
    """The names of the functions that a mask function combines, none when traced.

    Raises:
        UnsupportedError: it does not make a causal or bidirectional mask, with a window or packed sequences; or the
            model's own code reads it.
    """
    _refuse_readers(config)
    names = set() if is_traced() else set(_names(function))
    chunked = local_size is not None and local_size != getattr(config, "sliding_window", None)
    unbounded = local_size is None and any(name.startswith("sliding_window") for name in names)
    if use_vmap or chunked or unbounded or names - _MASKS:
        other = ", ".join(sorted(names - _MASKS)) or "a function of the model's own"
        unsupported(
            WHERE,
            f"the mask is made by {other}",
            "masks are causal or bidirectional, with a sliding window; use attn_implementation='sdpa' for this model",
        )
    return names


def _refuse_readers(config: Any) -> None:
    """Raise for a model whose own code reads the mask, which is not a tensor of booleans or biases here."""
    readers = [f"{name} (config.{setting})" for setting, name in _SPARSE.items() if getattr(config, setting, None)]
    if getattr(config, "is_encoder_decoder", False) and config.model_type in _READERS:
        readers.append(config.model_type)
    if readers:
        unsupported(
            WHERE,
            f"{readers[0]} reads the attention mask in the model's own code",
            "use attn_implementation='eager' for this model",
        )


def _names(function: Callable[..., Any]) -> Iterator[str]:
    """The names of the functions that ``function`` combines.

    Another callable, such as a partial, has a name of no known mask.
    """
    if not isinstance(function, FunctionType):
        yield getattr(function, "__qualname__", type(function).__name__)
        return
    cells = function.__closure__ or ()
    held = dict(zip(function.__code__.co_freevars, (c.cell_contents for c in cells), strict=True))
    yield function.__qualname__.split(".")[0]
    for part in (*held.get("mask_functions", ()), *([held["mask_function"]] if "mask_function" in held else [])):
        yield from _names(part)


def _shows_all(given: Tensor, total: int | Tensor, kv_offset: int) -> bool:
    """Whether ``given [batch, tokens]`` hides no token, as in most steps. Traced, that is not known."""
    if is_traced():
        return False
    columns = given.shape[1] - kv_offset
    if isinstance(total, int):
        return total <= columns and bool(given.all())
    return bool(given.all() & (total <= columns))


def _check_tokens(given: Tensor, tokens: int | Tensor) -> None:
    """Raise unless ``given [batch, tokens]`` has the ``tokens`` of the cache after the step.

    A tensor of them, which a graph computes, is asserted.
    """
    expected, fix = "the tokens of the cache and the new ones", "pass an attention_mask with all tokens"
    if isinstance(tokens, Tensor):
        covered = (tokens <= given.shape[1]).all()
        torch._assert_async(covered, f"{WHERE}: attention_mask has fewer tokens; expected {expected}; {fix}")
    elif given.shape[1] < tokens:
        fail(ShapeError, WHERE, f"attention_mask has {given.shape[1]} tokens", f"{tokens}, {expected}", fix)


def _padding(given: Tensor, end: Tensor, kv_offset: int, causal: bool, window: int) -> tuple[Tensor, Tensor, bool]:
    """Bounds of the keys that ``given [batch, tokens]`` leaves, and whether it hides any.

    Padding on the right does not move the end of a causal mask: rows before it see no key after them. With a window on
    both sides it may not be there, since the last row is at the last key.
    """
    tokens = torch.arange(given.shape[1], device=given.device)
    seen = given.bool() & (tokens >= kv_offset) & (tokens < (end[:, None] + kv_offset))
    count = seen.sum(1)
    first = torch.where(count > 0, seen.int().argmax(1), end + kv_offset)
    last = torch.where(count > 0, given.shape[1] - seen.flip(1).int().argmax(1), end + kv_offset)
    whole = last - first == count
    if window and not causal:
        whole = whole & (last == end + kv_offset)
    whole = whole.all()
    if not is_traced():
        complete, hidden, held = torch.stack((whole, (count < end).any(), end.max() + kv_offset)).tolist()
        if causal:
            _check_tokens(given, held)
        if not complete:
            unsupported(
                WHERE,
                "attention_mask hides tokens between or after those that it shows",
                "pad on the left (padding_side='left')",
            )
    else:
        torch._assert_async(
            whole, f"{WHERE}: attention_mask hides tokens between or after those that it shows; pad on the left"
        )
        hidden = True
    begin = (first - kv_offset).int()
    return begin, end if causal else (last - kv_offset).int(), hidden


def _assert_causal(
    function: Callable[..., Any], batch: int, length: int, kv_length: int, offset: int | Tensor, device: Any
) -> None:
    """No row sees the key after its own: traced, functions that are combined cannot be recognized by their names."""
    request, rows = torch.arange(batch, device=device)[:, None], torch.arange(length, device=device)[None] + offset
    after = (rows + 1).clamp(max=kv_length - 1)
    later = function(request, torch.zeros_like(request), rows, after) & (after > rows)
    torch._assert_async(~later.any(), f"{WHERE}: tokens see later ones; use attn_implementation='sdpa'")


def _sequences(function: Callable[..., Any], batch: int, length: int, device: Any) -> tuple[Tensor, Tensor]:
    """Begin and end of the packed sequences of a batch, as rows of all its requests. Traced, ``batch * length`` of
    them, of which the last are empty."""
    request = torch.arange(batch, device=device)[:, None]
    rows = torch.arange(length, device=device)[None]
    together = function(request, torch.zeros_like(request), rows, (rows - 1).clamp(min=0))  # with the row before
    first = ~together.expand(batch, length) | (rows == 0)
    sequence = first.flatten().cumsum(0) - 1
    sizes = torch.zeros(batch * length, dtype=torch.int64, device=device)
    sizes = sizes.scatter_add(0, sequence, torch.ones_like(sequence))
    if not is_traced():
        sizes = sizes[: int(sequence[-1]) + 1]
    end = sizes.cumsum(0)
    return end - sizes, end
