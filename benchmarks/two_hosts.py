"""Runs a script under torchrun on two "hosts" of one machine: network namespaces joined by a link of a given rate.

    python benchmarks/two_hosts.py --rate 1gbit --nproc-per-node 2 -- script.py --its-arguments
    python benchmarks/two_hosts.py --rate 1gbit --nproc-per-node 2 -- -m usp.cli probe

Needs Linux, root, and `ip` and `tc` of iproute2. Exit code: torchrun's, 3 where the machine does
not allow it, 124 after --timeout.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.77.0.1", "10.77.0.2")
LINK = "link0"


class NotAllowed(Exception):
    """The machine does not allow it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rate", default="1gbit", help="of the link, each way, as tc writes it, or none (default: 1gbit)"
    )
    parser.add_argument("--nproc-per-node", type=int, default=2, help="processes on each host (default: 2)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds until all is ended (default: 600)")
    parser.add_argument("script", nargs="+", help="what torchrun is to run, after --")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that what is below cleans up
    try:
        with two_hosts(options.rate) as hosts:
            code = run(hosts, options)
            for host in hosts:
                sent = shell("ip", "netns", "exec", host, "cat", f"/sys/class/net/{LINK}/statistics/tx_bytes")
                print(f"{host} sent {int(sent) / 1e6:.1f} MB over the link", file=sys.stderr)
            return code
    except NotAllowed as reason:
        print(f"two_hosts: {reason}", file=sys.stderr)
        return 3


@contextmanager
def two_hosts(rate: str) -> Iterator[list[str]]:
    """Two namespaces with a link between them; it goes with them."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        raise NotAllowed(f"needs root, and ip and tc of iproute2; missing: {' and '.join(missing) or 'root'}")
    hosts = [f"usp-{os.getpid()}-{i}" for i in range(2)]
    try:
        for host in hosts:
            shell("ip", "netns", "add", host)
        shell(*f"ip link add {LINK} netns {hosts[0]} type veth peer name {LINK} netns {hosts[1]}".split())
        for host, address in zip(hosts, ADDRESSES, strict=True):
            shell(*f"ip -n {host} addr add {address}/24 dev {LINK}".split())
            shell(*f"ip -n {host} link set lo up".split())
            shell(*f"ip -n {host} link set {LINK} up".split())
            shape(rate, "-n", host)
        yield hosts
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        for host in hosts:
            end(host)


def shape(rate: str, *where: str) -> None:
    """Gives what this host sends over the link a rate, as tc writes it, or "none": as fast as it can."""
    # The kernel hands over segments of up to 64 KiB at once: a smaller bucket would drop them.
    queue = "noqueue" if rate == "none" else f"tbf rate {rate} burst 128kb latency 100ms"
    shell("tc", *where, *f"qdisc replace dev {LINK} root {queue}".split())


def run(hosts: list[str], options: argparse.Namespace) -> int:
    """Exit code of torchrun: the first that is not 0. When one host fails, the other is ended."""
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"GLOO_SOCKET_IFNAME": LINK, "TP_SOCKET_IFNAME": LINK}
    deadline = time.monotonic() + options.timeout
    torchrun = f"-m torch.distributed.run --nnodes 2 --nproc-per-node {options.nproc_per_node}".split()
    torchrun += f"--master-addr {ADDRESSES[0]} --master-port 29500 --node-rank".split()
    agents = [
        subprocess.Popen(
            [*f"ip netns exec {host}".split(), sys.executable, *torchrun, str(i), *options.script], env=environment
        )
        for i, host in enumerate(hosts)
    ]
    try:
        while time.monotonic() < deadline:
            codes = [agent.poll() for agent in agents]
            if any(codes) or None not in codes:
                return next((code for code in codes if code), 0)
            time.sleep(0.1)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    print(f"two_hosts: not done after {options.timeout:g} s", file=sys.stderr)
    return 124


def end(host: str) -> None:
    """Ends every process of a namespace, and the namespace."""
    for _ in range(50):
        listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout.split()
        for pid in map(int, listed):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself
        if not listed:
            break
        time.sleep(0.1)
    subprocess.run(["ip", "netns", "del", host], stderr=subprocess.DEVNULL)


def shell(*command: str) -> str:
    """What a command prints. Raises NotAllowed if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotAllowed(f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
