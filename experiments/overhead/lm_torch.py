"""`lm_tiny` in PyTorch under DDP or FSDP2, over gloo, for `lm_peers.py` to compare with.

Needs PyTorch, in a separate environment. `lm_peers.py` starts it and sets RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT, STARTED and WEIGHTS.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lm_peers import inputs, measure
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, LAYERS, HEADS, HIDDEN, LENGTH = 256, 128, 4, 4, 384, 256


def rotate(x):
    half = x.shape[-1] // 2
    angle = torch.arange(LENGTH)[:, None] * 1e4 ** (-torch.arange(half) / half)[None]
    sin, cos = torch.sin(angle)[None, None], torch.cos(angle)[None, None]
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH, 1e-6), nn.RMSNorm(WIDTH, 1e-6)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        qkv = self.qkv(self.attention_norm(x)).view(*x.shape[:2], 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, 1e-6)

    def forward(self, tokens):
        x = self.embed(tokens) * WIDTH**0.5
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def load(model, weights) -> None:
    """Copies the common weights into the model; a linear layer has the transpose."""
    for name, parameter in model.named_parameters():
        words = name.removesuffix(".weight").split(".")
        x = weights[words[-1]][int(words[1])] if words[0] == "blocks" else weights[words[0]]
        transposed = x.ndim == 2 and words[0] == "blocks"
        parameter.data.copy_(torch.from_numpy(x.T if transposed else x))


def average(losses: list[float]) -> list[float]:
    """Averages the losses over the processes."""
    total = torch.tensor(losses)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("code", choices=["torch"])
    parser.add_argument("strategy", choices=["ddp", "fsdp"])
    parser.add_argument("--steps", type=int, required=True)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = Decoder()
    weights, tokens = inputs()
    load(model, weights)
    if flags.strategy == "ddp":
        # One process averages with no one, and the wrapper would cost time.
        step_model = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    else:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        step_model = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1)
    tokens = torch.from_numpy(tokens).long()

    def step() -> float:
        optimizer.zero_grad()
        loss = step_model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    measure(step, flags.steps, average)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
