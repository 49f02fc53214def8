"""The step of `steps.py` in PyTorch: torch.compile, flash attention, fused AdamW, float32 weights.

python experiments/gpu/lm_torch.py MODEL SEQUENCES [--remat=full|none] [--eager] [--device=cpu]
"""

import argparse
import json
import math
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

LENGTH, WARM_UP, STEPS, VOCABULARY = 2048, 5, 20, 32768
SIZES = {  # width, layers, heads, hidden, tied
    "lm_1b": (2048, 16, 16, 8192, False),
    "lm_125m": (768, 12, 12, 2560, True),
}


class Linear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x.float(), self.normalized_shape, self.weight, self.eps).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = Norm(width, 1e-6), Norm(width, 1e-6)
        self.qkv = Linear(width, 3 * width, bias=False)
        self.out = Linear(width, width, bias=False)
        self.gate_up = Linear(width, 2 * hidden, bias=False)
        self.down = Linear(hidden, width, bias=False)

    def rotate(self, x):
        half = x.shape[-1] // 2
        places = torch.arange(LENGTH, device=x.device)[:, None]
        angle = places * 1e4 ** (-torch.arange(half, device=x.device) / half)[None]
        sin, cos = torch.sin(angle)[None, None], torch.cos(angle)[None, None]
        left, right = x.float().chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)

    def forward(self, x):
        qkv = self.qkv(self.attention_norm(x)).view(*x.shape[:2], 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self, model: str, remat: str):
        super().__init__()
        width, layers, heads, hidden, tied = SIZES[model]
        self.remat = remat
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = Norm(width, 1e-6)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        width = self.embed.weight.shape[1]
        x = (self.embed(tokens) * math.sqrt(width)).to(torch.bfloat16)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.remat == "full" else block(x)
        logits = F.linear(self.norm(x), self.head.weight.to(x.dtype)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=SIZES)
    parser.add_argument("sequences", type=int)
    parser.add_argument("--remat", choices=["full", "none"], default="full")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--device", default="cuda")
    flags = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    started = time.perf_counter()
    with torch.device(flags.device):
        model = Decoder(flags.model, flags.remat)
        tokens = torch.randint(0, VOCABULARY, (flags.sequences, LENGTH))
    run = model if flags.eager else torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1, fused=True)
    seconds, losses = [], []
    for i in range(WARM_UP + STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = run(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        if i == 0:
            first = time.perf_counter() - started
    step = statistics.median(seconds[WARM_UP:])
    found = {
        "case": f"PyTorch {flags.model} {flags.sequences} {flags.remat} eager={flags.eager}",
        "ms": step * 1e3,
        "least and greatest": [min(seconds[WARM_UP:]) * 1e3, max(seconds[WARM_UP:]) * 1e3],
        "tokens/s": flags.sequences * LENGTH / step,
        "peak GB": torch.cuda.max_memory_allocated() / 1e9 if flags.device == "cuda" else None,
        "first step s": first,
        "losses": [losses[0], losses[-1]],
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
