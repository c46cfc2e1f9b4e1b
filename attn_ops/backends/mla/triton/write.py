"""A step's latents into the paged cache, in one kernel: the eager form of `write_mla_kv`.

T tokens, P blocks, B block size, Lkv latent, R head size with RoPE.
"""

import torch
import triton
import triton.language as tl

from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs


@triton.jit
def store_part(x_ptr, out_ptr, row, stride, scale, limit, SIZE: tl.constexpr, FP8: tl.constexpr):
    """x [SIZE] of a row, divided by `scale` and saturated if FP8."""
    PADDED: tl.constexpr = triton.next_power_of_2(SIZE)
    c_C = tl.arange(0, PADDED)
    x_C = tl.load(x_ptr + row * stride + c_C, mask=c_C < SIZE, other=0.0)
    if FP8:
        # NaN stays: `minimum` and `maximum` would drop it.
        x_C = tl.math.div_rn(x_C.to(tl.float32), scale)
        x_C = tl.where(x_C > limit, limit, tl.where(x_C < -limit, -limit, x_C))
    tl.store(out_ptr + c_C, x_C.to(out_ptr.dtype.element_ty), mask=c_C < SIZE)


@triton.jit(do_not_specialize_on_alignment=["slot_ptr", "scale_ptr"])
def write_kernel(
    kv_ptr,  # [P, B, LATENT + ROTATED]
    kv_c_ptr,  # [T, LATENT]
    k_pe_ptr,  # [T, ROTATED]
    slot_ptr,  # [T] int64
    scale_ptr,  # [1] float32, if HAS_SCALE
    stride_block,
    stride_token,
    stride_kv_c,
    stride_k_pe,
    limit,  # the largest value, if FP8
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T,). Padding goes to slot 0, of the null block."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    out_ptr = kv_ptr + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
    scale = 1.0
    if HAS_SCALE:
        scale = tl.load(scale_ptr)
    store_part(kv_c_ptr, out_ptr, row, stride_kv_c, scale, limit, LATENT, FP8)
    store_part(k_pe_ptr, out_ptr + LATENT, row, stride_k_pe, scale, limit, ROTATED, FP8)


def write_latents(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    fp8: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """Write rows to their slots, as `write_mla_kv` has checked them; the last strides are 1.

    Args:
        kv_c, k_pe: [T, Lkv] and [T, R].
        kv_cache: [P, B, Lkv + R], or uint8 with `fp8`; mutated.
        slots: [T] int64.
        fp8: dtype of an FP8 cache.
        scale: [1] float32: an FP8 cache holds x / scale; None is 1.
    """
    if slots.shape[0] == 0:
        return
    scaled = fp8 is not None and scale is not None
    with torch.cuda.device_of(kv_cache):
        quick(write_kernel, (slots.shape[0],))(
            kv_cache if fp8 is None else kv_cache.view(fp8),
            kv_c,
            k_pe,
            slots,
            scale if scaled else kv_c,
            *kv_cache.stride()[:2],
            kv_c.stride(0),
            k_pe.stride(0),
            0.0 if fp8 is None else torch.finfo(fp8).max,
            LATENT=kv_c.shape[1],
            ROTATED=k_pe.shape[1],
            BLOCK_SIZE=kv_cache.shape[1],
            FP8=fp8 is not None,
            HAS_SCALE=scaled,
            num_warps=4,
            **early_launch(kv_cache.device),
        )
