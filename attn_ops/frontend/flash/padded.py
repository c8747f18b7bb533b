"""Sequences that use fewer tokens than ``cu_seqlens`` has places for: ``seqused_q`` and ``seqused_k``."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.eager.op_call import MappedCall
from attn_ops.errors import DeviceError, PageTableError, ShapeError, fail, shape_of
from attn_ops.frontend.block_tables import lengths
from attn_ops.frontend.call import AttentionCall
from attn_ops.frontend.flash.calls import requests_of
from attn_ops.ops.options import FP8
from attn_ops.plan.page_table import offsets, seen
from attn_ops.symbolic_sizes import agree


class Used(NamedTuple):
    """The used tokens: the first ``seqused[b]`` tokens of each sequence b, packed.

    cu_seqlens  int32 ``[batch + 1]``: cumulative used tokens
    source      int64 ``[tokens]``: for each used token its index among all tokens; arbitrary behind the last used one
    place       int64 ``[tokens]``: for each token its index among the used tokens; arbitrary if it is not used
    used        bool ``[tokens]``: whether a token is used
    """

    cu_seqlens: Tensor
    source: Tensor
    place: Tensor
    used: Tensor

    @classmethod
    def of(cls, where: str, side: str, cu_seqlens: Tensor, seqused: Tensor, t: Tensor) -> Used:
        """The used tokens of ``t``, by ``cu_seqlens_{side}`` and ``seqused_{side}``."""
        name = f"cu_seqlens_{side}"
        batch, tokens, device = requests_of(where, name, cu_seqlens), t.shape[0], t.device
        begins = offsets(where, name, cu_seqlens, batch, side, tokens).to(device)
        used, most = lengths(where, f"seqused_{side}", seqused, batch, device), begins.diff()
        if seen(used) and seen(most) and bool((used > most).any()):
            b = int((used > most).nonzero()[0])
            shown, expected = f"seqused_{side}[{b}] is {int(used[b])}", f"0 to {int(most[b])}, as {name} has tokens"
            fail(PageTableError, where, shown, expected, "correct it")
        used = used.minimum(most)
        packed = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
        token = torch.arange(tokens, device=device)

        def sequence(indptr: Tensor) -> Tensor:
            return (torch.searchsorted(indptr, token, right=True) - 1).clamp(0, batch)

        last, of_packed, of_token = max(0, tokens - 1), sequence(packed), sequence(begins)
        source = (begins[of_packed] + token - packed[of_packed]).clamp(0, last)
        number = token - begins[of_token]
        padded = torch.nn.functional.pad(used, (0, 1))  # tokens behind the last sequence are not used
        place = (packed[of_token] + number).clamp(0, last)
        return cls(packed, source.long(), place.long(), number < padded[of_token])

    def take(self, where: str, **tensors: Any) -> tuple[Any, ...]:
        """The used tokens of tensors of all tokens, which may be None."""
        (first, of), *_ = tensors.items()
        for name, t in tensors.items():
            if t is not None and not agree(t.shape[:1], of.shape[:1]):
                expected = f"{int(of.shape[0])} tokens, as {first}"
                fail(ShapeError, where, f"{name} is {shape_of(t)}", expected, "correct it")
            if t is not None and t.device != of.device:
                fail(DeviceError, where, f"{name} is on {t.device}", f"{of.device}, where {first} is", "move it")
        return tuple(None if t is None else t[self.source] for t in tensors.values())

    def spread_call(self, call: AttentionCall) -> MappedCall:
        """``call`` of used rows, with its results spread over all rows."""
        return_lse, out = call.output.return_lse, call.output.out
        return MappedCall(call, lambda result: self._spread(result, return_lse, out), repeatable=False)

    def _spread(self, result: Any, return_lse: bool, out: Tensor | None) -> Any:
        """The results of all rows from those of used rows, which may be in ``out``. Unused rows get 0 and -inf."""
        packed, lse = result if return_lse else (result, None)
        bits = packed.view(torch.uint8) if packed.dtype in FP8 else packed  # bits of 0 are 0
        spread = torch.where(self.used[:, None, None], bits[self.place], 0).view(packed.dtype)
        if out is not None:
            spread = out.copy_(spread)
        return spread if lse is None else (spread, torch.where(self.used, lse[:, self.place], -math.inf))
