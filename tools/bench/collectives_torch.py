"""Times gloo's collectives like `megatron bench collectives`: best batch, size of the larger buffer.

Prints `operation bytes µs` a line. Run by collectives.sh; by hand:
    python collectives_torch.py RANKS f32|bf16 BYTES,... SECONDS
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

BATCHES = 5
FIRST_BATCH = 3
GROWTH = 4


def fastest(call, seconds):
    """Seconds per call: the smallest mean of the batches that fill `seconds` on rank 0."""
    # The first calls are slower than later ones, so batches grow until one is nearly long enough.
    calls, enough = FIRST_BATCH, False
    while not enough:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wanted = torch.tensor([int(seconds / BATCHES / (time.perf_counter() - start) * calls)])
        dist.broadcast(wanted, 0)
        enough = int(wanted) <= calls * GROWTH
        calls = max(1, int(wanted)) if enough else calls * GROWTH
    best = float("inf")
    for _ in range(BATCHES):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    dist.barrier()
    return best


def rank_main(rank, ranks, dtype, sizes, seconds, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for size in sizes:
        part = -(-size // (ranks * dtype.itemsize))
        whole, share = torch.zeros(part * ranks, dtype=dtype), torch.zeros(part, dtype=dtype)
        other = torch.zeros_like(whole)

        def there_and_back():
            if rank == 0:
                dist.send(whole, 1)
                dist.recv(whole, 1)
            elif rank == 1:
                dist.recv(whole, 0)
                dist.send(whole, 0)

        operations = {
            "all_reduce": (lambda: dist.all_reduce(whole), 1.0),
            "all_gather": (lambda: dist.all_gather_into_tensor(whole, share), 1.0),
            "reduce_scatter": (lambda: dist.reduce_scatter_tensor(share, whole), 1.0),
            "all_to_all": (lambda: dist.all_to_all_single(other, whole), 1.0),
            "send/recv": (there_and_back, 0.5),
        }
        for name, (call, scale) in operations.items():
            took = fastest(call, seconds) * scale
            if rank == 0:
                print(name, size, took * 1e6, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, dtype, sizes, seconds = sys.argv[1:]
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    store = f"/tmp/collectives-{os.getpid()}"
    arguments = (int(ranks), dtype, [int(size) for size in sizes.split(",")], float(seconds), store)
    try:
        mp.spawn(rank_main, arguments, nprocs=int(ranks))
    finally:
        if os.path.exists(store):
            os.remove(store)
