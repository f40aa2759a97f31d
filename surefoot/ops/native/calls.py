"""The compiled passes as functions of tensors. Each returns None where it does not apply: the caller then uses PyTorch's.

They apply to bf16 tensors on a CPU. Legend: B batch, L length, H heads, K head size, D width;
in sums of rows T tokens, R rows, K rows a token; C rows and V vocabulary.
"""

from __future__ import annotations

from ctypes import CDLL

import torch
from torch import Tensor, nn

from surefoot.ops.native.build import library


def _kernels_for(*tensors: Tensor, is_fit: bool) -> CDLL | None:
    """The passes, where all are real bf16 tensors on the CPU (a tracer's stand-ins have no memory to point at) and what else
    a pass asks for is so."""
    applies = not torch.compiler.is_compiling() and all(
        tensor.dtype is torch.bfloat16 and tensor.device.type == "cpu" and type(tensor) in {Tensor, nn.Parameter}
        for tensor in tensors
    )
    return library() if applies and is_fit else None


def rms_norm_forward(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    """(y, 1 / root mean square of each row as fp32 (..., 1))."""
    if (kernels := _kernels_for(x, is_fit=weight_D.dtype is torch.float32)) is None:
        return None
    x, weight_D = x.contiguous(), weight_D.contiguous()
    y, inverse = torch.empty_like(x), torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
    kernels.rms_norm_forward(
        inverse.numel(), x.shape[-1], x.data_ptr(), weight_D.data_ptr(), eps, y.data_ptr(), inverse.data_ptr()
    )
    return y, inverse


def rms_norm_backward(x: Tensor, weight_D: Tensor, inverse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor] | None:
    """(gradient of x, gradient of the weight in fp32)."""
    if (kernels := _kernels_for(x, grad, is_fit=weight_D.dtype is torch.float32)) is None:
        return None
    x, grad, weight_D = x.contiguous(), grad.contiguous(), weight_D.contiguous()
    num_rows, width, num_parts = inverse.numel(), x.shape[-1], torch.get_num_threads()
    grad_x, partial = torch.empty_like(x), torch.empty((num_parts, width), dtype=torch.float32)
    kernels.rms_norm_backward(
        num_rows,
        width,
        num_parts,
        *(tensor.data_ptr() for tensor in (x, weight_D, inverse, grad, grad_x, partial)),
    )
    return grad_x, partial.sum(0)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor | None:
    """silu(gate) · up."""
    if (kernels := _kernels_for(gate, up, is_fit=gate.shape == up.shape)) is None:
        return None
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    kernels.swiglu_forward(gate.numel(), gate.data_ptr(), up.data_ptr(), y.data_ptr())
    return y


def swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor] | None:
    """(gradient of gate, gradient of up)."""
    if (kernels := _kernels_for(gate, up, grad, is_fit=gate.shape == up.shape)) is None:
        return None
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    kernels.swiglu_backward(gate.numel(), *(t.data_ptr() for t in (gate, up, grad, grad_gate, grad_up)))
    return grad_gate, grad_up


def sum_rows(x_RD: Tensor, rows_TK: Tensor, weights_TK: Tensor | None) -> Tensor | None:
    """The weighted sum of each token's rows, (T, D)."""
    is_fit = weights_TK is None or weights_TK.dtype is torch.float32
    if (kernels := _kernels_for(x_RD, is_fit=is_fit)) is None:
        return None
    x_RD, rows_TK = x_RD.contiguous(), rows_TK.contiguous()
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    y_TD = x_RD.new_empty((rows_TK.shape[0], x_RD.shape[1]))
    pointers = (x_RD.data_ptr(), rows_TK.data_ptr(), None if weights_TK is None else weights_TK.data_ptr())
    kernels.sum_rows(*rows_TK.shape, x_RD.shape[1], *pointers, y_TD.data_ptr())
    return y_TD


def spread_rows(x_RD: Tensor, rows_TK: Tensor, weights_TK: Tensor, grad_TD: Tensor) -> tuple[Tensor, Tensor] | None:
    """(gradient of x, gradient of the weights) of `sum_rows` where each row belongs to one token."""
    if (kernels := _kernels_for(x_RD, grad_TD, is_fit=weights_TK.dtype is torch.float32)) is None:
        return None
    tensors = tuple(tensor.contiguous() for tensor in (x_RD, rows_TK, weights_TK, grad_TD))
    grad_x_RD, grad_TK = torch.empty_like(tensors[0]), torch.empty_like(tensors[2])
    kernels.spread_rows(
        *rows_TK.shape, x_RD.shape[1], *(tensor.data_ptr() for tensor in (*tensors, grad_x_RD, grad_TK))
    )
    return grad_x_RD, grad_TK


def rotate(x_BLHK: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor | None:
    """Each head turned by its position's angle; tables (L, 1, K/2) or (B, L, 1, K/2), fp32."""
    if (kernels := _kernels_for(x_BLHK, is_fit=cos.dtype is torch.float32)) is None:
        return None
    batch, length, num_heads, size = x_BLHK.shape
    if x_BLHK.stride(3) != 1 or x_BLHK.stride(2) != size:
        x_BLHK = x_BLHK.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    table_batch = length * size // 2 if cos.dim() == 4 and cos.shape[0] == batch and batch > 1 else 0
    if cos.numel() != (batch if table_batch else 1) * length * size // 2:
        return None
    y_BLHK = torch.empty((batch, length, num_heads, size), dtype=torch.bfloat16)
    kernels.rotate(
        batch,
        length,
        num_heads,
        size,
        x_BLHK.data_ptr(),
        x_BLHK.stride(0),
        x_BLHK.stride(1),
        cos.data_ptr(),
        sin.data_ptr(),
        table_batch,
        float(direction),
        y_BLHK.data_ptr(),
    )
    return y_BLHK


def cross_entropy(
    logits_CV: Tensor, targets_C: Tensor, z_weight: float, *, writes: bool
) -> tuple[Tensor, Tensor] | None:
    """(negative log-likelihood, log-partition) of each row in fp32, zero where the target is negative; with `writes` the logits
    become their gradients."""
    if (kernels := _kernels_for(logits_CV, is_fit=logits_CV.is_contiguous())) is None:
        return None
    targets_C = targets_C.contiguous()
    nll_C, log_total_C = (torch.empty(targets_C.shape, dtype=torch.float32) for _ in range(2))
    pointers = (logits_CV.data_ptr(), targets_C.data_ptr())
    kernels.cross_entropy(*logits_CV.shape, *pointers, z_weight, int(writes), nll_C.data_ptr(), log_total_C.data_ptr())
    return nll_C, log_total_C
