"""For `benchmarks/two_hosts.py`: a link that is slow, and then is no more."""

import os
import subprocess
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import usp
from usp.errors import TransportError

TIMEOUT = timedelta(seconds=4)


def main() -> None:
    """Prints, for each rank, what it raised and when."""
    dist.init_process_group("gloo")
    topology = usp.Topology.build(2, 2, timeout=TIMEOUT)
    attn = usp.USPAttention(topology=topology, layout="zigzag")
    q, k, v = (torch.randn(1, 512, 8, 32, requires_grad=True) for _ in range(3))
    attn(q, k, v, is_causal=True).sum().backward()
    store = dist.distributed_c10d._get_default_store()
    print(f"rank {dist.get_rank()}: a step is done", flush=True)
    dist.barrier()
    if dist.get_rank() == 0:
        store.set("dropped", str(time.time()))
    start = float(store.get("dropped"))
    time.sleep(1)  # until all have read it
    if dist.get_rank() == 0:
        subprocess.run(["ip", "link", "set", "link0", "down"], check=True)
    try:
        attn(q, k, v, is_causal=True).sum().backward()
    except TransportError as error:
        print(f"rank {dist.get_rank()} after {time.time() - start:.1f} s: {error}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
