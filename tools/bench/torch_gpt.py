"""The program to compare with: one GPT or Llama training step in PyTorch, as a user would write it today.

  python torch_gpt.py --preset small --threads 2                                  # one process
  torchrun --nproc_per_node 2 torch_gpt.py --preset small --threads 1             # data parallel (gloo; NCCL on GPUs)
  python torch_gpt.py --preset llama-1b-gpu --dtype bf16 --compile 1              # on a GPU, if there is one

Trains the presets of `megatron bench step` on random tokens and prints a line of the same form: tokens per second (median of the
timed steps, all ranks together), TFLOP/s, largest memory of a rank (resident, or allocated on its GPU), loss of the last step.
Operations per token: 6·N + 6·L·H·S, N without position embeddings and with the shared output matrix once (causal attention).
"""

import argparse
import os
import resource
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

PRESETS = {  # layers, hidden, heads, kv heads, ffn, sequence, microbatch, vocabulary, style; as in tools/src/bench/preset.rs
    "small": (6, 384, 6, 6, 1536, 256, 8, 8192, "gpt2"),
    "llama-small": (6, 384, 6, 2, 1024, 256, 8, 8192, "llama"),
    "gpt2-124m": (12, 768, 12, 12, 3072, 512, 2, 50304, "gpt2"),
    "gpt2-124m-gpu": (12, 768, 12, 12, 3072, 1024, 32, 50304, "gpt2"),
    "llama-1b-gpu": (16, 2048, 32, 8, 8192, 4096, 4, 32768, "llama"),
}
WARM_UP = 3

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--preset", default="small", choices=PRESETS)
parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
parser.add_argument("--compile", type=int, default=0, help="1: torch.compile the model")
parser.add_argument("--fsdp", type=int, default=0, help="1: shard (fully_shard), not DDP")
parser.add_argument("--steps", type=int, default=12, help="timed steps, after 3 for warm-up")
parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every rank")
parser.add_argument("--micro-batch-size", type=int, default=0, help="default: the preset's")
args = parser.parse_args()

L, H, HEADS, KV_HEADS, FFN, S, B, V, STYLE = PRESETS[args.preset]
B = args.micro_batch_size or B
D = H // HEADS
GPT2 = STYLE == "gpt2"

torch.set_num_threads(args.threads)
torch.manual_seed(0)
distributed = "RANK" in os.environ
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if GPU:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.set_float32_matmul_precision("high")
if distributed:
    dist.init_process_group("nccl" if GPU else "gloo")
world = dist.get_world_size() if distributed else 1

frequencies = 1.0 / (10000 ** (torch.arange(0, D, 2).float() / D))
angles = torch.outer(torch.arange(S).float(), frequencies)
COS, SIN = (torch.cat([t] * 2, 1).to(DEVICE) for t in (angles.cos(), angles.sin()))


def rope(x):
    rotated = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
    return x * COS.to(x.dtype) + rotated * SIN.to(x.dtype)


def norm():
    return nn.LayerNorm(H) if GPT2 else nn.RMSNorm(H)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = norm(), norm()
        self.qkv = nn.Linear(H, (HEADS + 2 * KV_HEADS) * D, bias=GPT2)
        self.out = nn.Linear(H, H, bias=GPT2)
        self.up = nn.Linear(H, FFN if GPT2 else 2 * FFN, bias=GPT2)
        self.down = nn.Linear(FFN, H, bias=GPT2)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).split((HEADS * D, KV_HEADS * D, KV_HEADS * D), 2)
        q, k, v = (z.view(b, s, -1, D).transpose(1, 2) for z in (q, k, v))
        if not GPT2:
            q, k = rope(q), rope(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=KV_HEADS != HEADS)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, H))
        h = self.up(self.norm2(x))
        if GPT2:
            h = F.gelu(h, approximate="tanh")
        else:
            gate, up = h.chunk(2, -1)
            h = F.silu(gate) * up
        return x + self.down(h)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(V, H)
        self.positions = nn.Embedding(S, H) if GPT2 else None
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.norm = norm()
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(S, device=DEVICE))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.float().view(-1, V), targets.reshape(-1))


model = GPT().to(DEVICE)
num_params = sum(
    p.numel() for name, p in model.named_parameters() if not name.startswith("positions")
)
if args.fsdp:
    # A unit per block; the rest, with the tied embedding, is the root's. Gradients are summed in fp32.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(DEVICE, (world,))
    policy = MixedPrecisionPolicy()
    if args.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    trained = model
else:
    trained = nn.parallel.DistributedDataParallel(model) if distributed else model
if args.compile:
    trained = torch.compile(trained)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
seconds = []
for step in range(WARM_UP + args.steps):
    sample = torch.randint(0, V, (B, S + 1), device=DEVICE)
    if GPU:
        torch.cuda.synchronize()
    start = time.perf_counter()
    autocast = args.dtype == "bf16" and not args.fsdp
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        loss = trained(sample[:, :-1], sample[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if GPU:
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - start)

gib = (
    torch.cuda.max_memory_allocated() / 2**30
    if GPU
    else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
)
peak = torch.tensor([gib], device=DEVICE)
if distributed:
    dist.all_reduce(peak, dist.ReduceOp.MAX)
rate = world * B * S / statistics.median(seconds[WARM_UP:])
tflops = rate * (6 * num_params + 6 * L * H * S) / 1e12
if not distributed or dist.get_rank() == 0:
    print(
        f"torch {torch.__version__} {DEVICE} {args.preset} {args.dtype} compile={args.compile} fsdp={args.fsdp} world={world} threads={args.threads} "
        f"params={num_params / 1e6:.1f}M tokens_per_second={rate:.0f} tflops={tflops:.4f} peak_gib={peak.item():.2f} "
        f"loss={loss.item():.3f}"
    )
if distributed:
    dist.destroy_process_group()
