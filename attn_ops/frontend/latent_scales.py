"""Scales of an FP8 latent cache: a number for each part of a key, or a scale per token and group of columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_ops.eager.interposition import check_no_grad
from attn_ops.errors import DeviceError, DTypeError, OptionError, ShapeError, dtype_name, fail, shape_of
from attn_ops.frontend.arguments import computed_dtype, finite, ranked
from attn_ops.frontend.scales import positive_number
from attn_ops.ops.options import FP8

SCALE_GROUP = 128
"""Columns of the latents that share a scale in ``ckv_scale_arr``."""


def check_scales(
    where: str, ckv_scale: float | None, ckv_scale_arr: Tensor | None, kpe_scale: float | None, required: bool
) -> None:
    """Raise unless the latents have one kind of scale, which is positive, and both scales are given if ``required``.

    FlashInfer's tests match the text of ``rule``.
    """
    if ckv_scale is not None:
        positive_number(where, "ckv_scale", ckv_scale)
    finite(where, "kpe_scale", kpe_scale)
    rule = "Exactly one of ckv_scale or ckv_scale_arr scales the latents"
    if ckv_scale is not None and ckv_scale_arr is not None:
        fail(OptionError, where, f"{rule}: both are given", "one of them", "leave out the other")
    if not required:
        return
    unscaled = "1.0 for values that were not scaled"
    if ckv_scale is None and ckv_scale_arr is None:
        fail(OptionError, where, f"{rule} of an FP8 cache: none is given", "one of them", f"pass ckv_scale, {unscaled}")
    if kpe_scale is None:
        fail(OptionError, where, "kpe_scale is None for an FP8 cache", "a number", f"pass it, {unscaled}")


def scaled_query(
    q_nope: Tensor, q_pe: Tensor, kv_dtype: torch.dtype, ckv_scale: float | None, kpe_scale: float | None
) -> tuple[Tensor, Tensor, dict[str, float | None]]:
    """Both parts of the query, one multiplied by the ratio of the scales, and the factor of the logits by name.

    The factor is the larger scale, so that no part of the query grows: float16 would overflow. A scale of None is 1.
    """
    ckv, kpe = (1.0 if scale is None else scale for scale in (ckv_scale, kpe_scale))
    by_ckv = {"ckv_scale": ckv_scale}
    if kpe == ckv:
        return q_nope, q_pe, by_ckv
    q_pe = q_pe.to(computed_dtype(q_pe.dtype, kv_dtype))
    if abs(kpe) < ckv:
        return q_nope, q_pe * (kpe / ckv), by_ckv
    q_nope = q_nope.to(computed_dtype(q_nope.dtype, kv_dtype)) * (ckv / abs(kpe))
    return q_nope, q_pe if kpe > 0 else -q_pe, {"kpe_scale": abs(kpe)}


class GroupScales(NamedTuple):
    """Scales of an FP8 cache: ``ckv_scale_arr [pages, page_size, ckv / SCALE_GROUP]``, and one number for ``kpe``."""

    ckv: Tensor
    kpe: float

    @classmethod
    def of(cls, where: str, ckv_scale_arr: Tensor, ckv_cache: Tensor, kpe_scale: float | None) -> GroupScales:
        ranked(where, "ckv_cache", ckv_cache, "[pages, page_size, ckv]")
        pages, page_size, dim = ckv_cache.shape
        if dim % SCALE_GROUP or tuple(ckv_scale_arr.shape) != (pages, page_size, dim // SCALE_GROUP):
            fail(
                ShapeError,
                where,
                f"Invalid shape of ckv_scale_arr: {shape_of(ckv_scale_arr)} for a cache {shape_of(ckv_cache)}",
                f"[pages, page_size, ckv / {SCALE_GROUP}]",
                f"pass a scale for every token and {SCALE_GROUP} columns",
            )
        if ckv_scale_arr.dtype != torch.float32:
            shown = f"ckv_scale_arr is {dtype_name(ckv_scale_arr.dtype)}"
            fail(DTypeError, where, shown, "float32", "convert it")
        if ckv_scale_arr.device != ckv_cache.device:
            on = ckv_scale_arr.device
            fail(DeviceError, where, f"ckv_scale_arr is on {on}", f"{ckv_cache.device}, where the cache is", "move it")
        check_no_grad(where, ckv_scale_arr=ckv_scale_arr)
        return cls(ckv_scale_arr, 1.0 if kpe_scale is None else kpe_scale)

    def dequantize(
        self, tensors: tuple[Tensor, Tensor, Tensor, Tensor], page_table: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The op's tensors with caches of only the pages in ``page_table [entries]``, in that order."""
        q_nope, q_pe, ckv, kpe = tensors
        pages = page_table.clamp(0, max(0, ckv.shape[0] - 1)).long() if ckv.shape[0] else page_table[:0].long()
        dtype = torch.bfloat16 if q_nope.dtype in FP8 else q_nope.dtype
        groups = torch.unflatten(ckv[pages].float(), -1, (-1, SCALE_GROUP)) * self.ckv[pages][..., None]
        latents, rotated = groups.flatten(-2).to(dtype), (kpe[pages].float() * self.kpe).to(dtype)
        return q_nope, q_pe, latents, rotated
