"""A workload as a plain PyTorch loop: what a researcher writes by hand. One JSON line a step on stdout.

    python benchmarks/plain.py --size 30m --steps 30 --threads 2

Legend: B batch, L length, D width, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import rows as workload
from benchmarks.rows import Size


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped key-value heads."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size.width // size.heads
        self.wq = nn.Linear(size.width, size.width, bias=False)
        self.wk = nn.Linear(size.width, size.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(size.width, size.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x_BLD: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        batch, length, _ = x_BLD.shape
        q_BHLK, k_BGLK, v_BGLK = (
            layer(x_BLD).view(batch, length, -1, self.size).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)
        )
        q_BHLK, k_BGLK = turn(q_BHLK, cos_LK, sin_LK), turn(k_BGLK, cos_LK, sin_LK)
        y_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BGLK, v_BGLK, is_causal=True, enable_gqa=True)
        y_BLD: Tensor = self.wo(y_BHLK.transpose(1, 2).reshape(batch, length, -1))
        return y_BLD


def turn(x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    """Rotary positions, in fp32."""
    left, right = x_BHLK.float().chunk(2, -1)
    return torch.cat((left * cos_LK - right * sin_LK, right * cos_LK + left * sin_LK), -1).to(x_BHLK.dtype)


class Layer(nn.Module):
    """Attention and a SwiGLU network, each after a norm and beside a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(size.width, eps=workload.NORM_EPS)
        self.norm_ffn = nn.RMSNorm(size.width, eps=workload.NORM_EPS)
        self.attention = Attention(size)
        self.w_gate = nn.Linear(size.width, size.ffn, bias=False)
        self.w_up = nn.Linear(size.width, size.ffn, bias=False)
        self.w_down = nn.Linear(size.ffn, size.width, bias=False)

    def forward(self, x_BLD: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        x_BLD = x_BLD + self.attention(self.norm_attention(x_BLD), cos_LK, sin_LK)
        h_BLD = self.norm_ffn(x_BLD)
        y_BLD: Tensor = x_BLD + self.w_down(F.silu(self.w_gate(h_BLD)) * self.w_up(h_BLD))
        return y_BLD


class Llama(nn.Module):
    """The decoder."""

    def __init__(self, size: Size = workload.COMMON) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.depth))
        self.norm = nn.RMSNorm(size.width, eps=workload.NORM_EPS)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        head_size = size.width // size.heads
        frequencies = workload.ROPE_THETA ** (-torch.arange(0, head_size, 2).float() / head_size)
        angles = torch.outer(torch.arange(size.length).float(), frequencies)
        self.register_buffer("cos_LK", angles.cos(), persistent=False)
        self.register_buffer("sin_LK", angles.sin(), persistent=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens_BL: Tensor, targets_BL: Tensor) -> Tensor:
        """Mean cross-entropy."""
        x_BLD = self.embedding(tokens_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, self.cos_LK, self.sin_LK)
        logits_BLV = self.head(self.norm(x_BLD))
        return F.cross_entropy(logits_BLV.float().flatten(0, 1), targets_BL.flatten())


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as torch chooses to run it; norms do not decay, as in surefoot."""
    matrices: list[Tensor] = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors: list[Tensor] = [weight for weight in model.parameters() if weight.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups,
        lr=workload.LEARNING_RATE,
        betas=workload.BETAS,
        eps=workload.EPS,
        weight_decay=workload.WEIGHT_DECAY,
    )


def rate(step: int) -> float:
    """Learning rate of a step counted from 0: the middle of the step on a linear warm-up, then constant."""
    return workload.LEARNING_RATE * min(1.0, (step + 0.5) / workload.WARMUP_STEPS)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=workload.SIZES, default="common")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    arguments = parser.parse_args()
    size = workload.SIZES[arguments.size]
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = Llama(size)
    adamw = optimizer(model)
    for step in range(arguments.steps):
        for group in adamw.param_groups:
            group["lr"] = rate(step)
        read = torch.from_numpy(workload.rows(step * size.batch, size.batch, size))
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.dtype == "bf16"):
            loss = model(read[:, :-1].contiguous(), read[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.CLIP)
        adamw.step()
        adamw.zero_grad()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"loss": loss.item(), "time": time.time(), "memory_bytes": peak}), flush=True)


if __name__ == "__main__":
    main()
