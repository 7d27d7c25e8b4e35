"""The transports of a ring against each other: forward and backward of causal attention, in turns, under torchrun.

    python benchmarks/two_hosts.py --rate 1gbit --nproc-per-node 2 -- benchmarks/ring_transports.py
    torchrun --nproc-per-node 4 benchmarks/ring_transports.py

One ring over all ranks; H8 D64 float32 zigzag. Times are medians over rounds of the slowest rank.
"""

import argparse
import time
from statistics import median

import torch
import torch.distributed as dist

import usp

HEADS, HEAD_DIM = 8, 64


def times(transports: list[str], topology: usp.Topology, seq_len: int, kv_heads: int, rounds: int) -> list[float]:
    """Median seconds of a forward and backward pass on the slowest rank, for each transport."""
    local = usp.positions(seq_len, topology, layout="zigzag").numel()
    shapes = [(1, local, heads, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    dout = torch.randn_like(q)
    attends = [usp.USPAttention(topology=topology, layout="zigzag", transport=name) for name in transports]
    taken = torch.zeros(rounds + 1, len(transports), dtype=torch.float64)
    for turn in range(rounds + 1):  # the first one warms up
        for place in range(len(transports)) if turn % 2 else reversed(range(len(transports))):
            dist.barrier()
            start = time.perf_counter()
            out = attends[place](q, k, v, is_causal=True, seq_len=seq_len)
            torch.autograd.grad(out, (q, k, v), dout)
            taken[turn, place] = time.perf_counter() - start
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return [median(column.tolist()) for column in taken[1:].T]


def main() -> None:
    parser = argparse.ArgumentParser(description="The transports of a ring against each other.")
    parser.add_argument("--seq-lens", type=int, nargs="*", default=[2048, 4096, 8192])
    parser.add_argument("--kv-heads", type=int, nargs="*", default=[8, 2])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    topology = usp.Topology.build(1, dist.get_world_size(), allow_cross_node=True)
    inside = topology.ring_neighbours or 1
    double = [f"double_ring:{inside}"] if 1 < inside < topology.ring.degree else ["double_ring:2"]
    transports = ["p2p", "all_gather", *double]
    if topology.rank == 0:
        print(f"ring of {topology.ring.degree}, ms", *transports, sep=" | ", flush=True)
    for seq_len in options.seq_lens:
        for kv_heads in options.kv_heads:
            found = times(transports, topology, seq_len, kv_heads, options.rounds)
            if topology.rank == 0:
                cells = (f"{seconds * 1e3:.0f}" for seconds in found)
                print(f"S {seq_len} kv_heads {kv_heads}", *cells, sep=" | ", flush=True)
    dist.barrier()  # nobody leaves while another still reads from it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
