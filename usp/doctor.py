"""What processes stand on: versions, devices, kernels, links and the network, and what is usually wrong there.

Every rank looks at itself and its host and leaves what it saw in the rendezvous store; rank 0 waits for the others, not
for ever, and judges. A collective could do neither with a rank that does not come or sends what another version wrote.
"""

import json
import os
import platform
import re
import socket
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from itertools import chain, combinations, groupby
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

import usp
from usp import kernels
from usp.errors import KernelError, TopologyError, TransportError
from usp.kernels.base import Call
from usp.probe import by_node

VARIABLES: Mapping[str, str] = {
    "OMP_NUM_THREADS": "threads that a rank computes with on a CPU",
    "CUDA_VISIBLE_DEVICES": "the GPUs that torch sees, in its order",
    "CUDA_LAUNCH_BLOCKING": "1: every kernel is waited for",
    "CUDA_DEVICE_MAX_CONNECTIONS": "queues to a GPU; with 1, kernels start in the order of their launch",
    "GLOO_SOCKET_IFNAME": "the network interface that gloo listens on",
    "NCCL_SOCKET_IFNAME": "the network interfaces that NCCL starts with",
    "NCCL_IB_HCA": "the InfiniBand or RoCE adapters that NCCL uses",
    "NCCL_IB_DISABLE": "1: NCCL uses no InfiniBand or RoCE",
    "NCCL_P2P_DISABLE": "1: NCCL copies between GPUs through the host, not over NVLink or PCIe",
    "NCCL_SHM_DISABLE": "1: NCCL uses no shared memory inside a node",
    "NCCL_DEBUG": "what NCCL logs",
    "NCCL_ALGO": "NCCL's algorithms; the same on all ranks",
    "NCCL_PROTO": "NCCL's protocols; the same on all ranks",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "whether a collective that fails or is late ends the process",
    "TORCH_NCCL_BLOCKING_WAIT": "1: whoever waits for a collective blocks the CPU",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "seconds without progress after which torch ends the process",
    "USP_CHECK": "when ranks compare their arguments: first, always, debug or off",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL: torch checks every collective with another one",
}
"""Environment variables that matter, and what each does."""
PREFIXES: Mapping[str, str] = {
    "NCCL_": "read by NCCL",
    "TORCH_NCCL_": "read by torch's NCCL backend",
    "GLOO_": "read by gloo",
}
"""Other variables that are shown."""
SLOW = {
    ("CUDA_LAUNCH_BLOCKING", "1"), ("NCCL_P2P_DISABLE", "1"), ("NCCL_IB_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1"),
    ("TORCH_NCCL_BLOCKING_WAIT", "1"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"), ("USP_CHECK", "debug"),
}  # fmt: skip
"""Settings for finding faults, which cost time."""
CALLS = (Call("cpu", torch.float32, 64, 64), Call("cuda", torch.bfloat16, 128, 128))
"""What attention is usually called with."""
CONNECT_SECONDS = 5.0
"""How long one attempt to connect may take."""
SMI_SECONDS = 20.0
"""How long nvidia-smi may take: it wakes sleeping GPUs first."""
SHOWN = 8
"""Most hosts that are listed by name."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: was looked at.
        found: there.
        level: "ok", "note" (it may cost time, or matter elsewhere) or "fault".
        advice: what to do about a note or a fault.
        where: the hosts that it is so on; "" for all.
    """

    what: str
    found: str
    level: Literal["ok", "note", "fault"] = "ok"
    advice: str = ""
    where: str = ""


@dataclass(frozen=True)
class Report:
    """What a process sees of itself and its host. Defaults stand for what another version of usp does not say.

    Attributes:
        host: its name.
        addresses: what that name resolves to, in order.
        interfaces: of the network, those that are up.
        versions: of what has to be the same everywhere.
        cuda: the version of CUDA or ROCm that torch was built for; "" for neither.
        backends: of torch.distributed.
        gpus: the names of those that torch sees.
        cores: that the process may use.
        threads: that torch computes with on them.
        kernels: (device, name, reason to refuse or None) for the calls of `CALLS` on devices that there are.
        chosen: (device, what kernel="auto" takes, or why it takes none, whether it does).
        smi_gpus: names of the GPUs that nvidia-smi lists; it is asked by one process of a host.
        smi_links: its matrix of links, a row for each GPU.
        smi_failure: why it does not answer, where it is installed.
        environment: the variables that matter, as far as they are set.
    """

    host: str = "?"
    addresses: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    cuda: str = ""
    backends: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    cores: int = 1
    threads: int = 1
    kernels: tuple[tuple[str, str, str | None], ...] = ()
    chosen: tuple[tuple[str, str, bool], ...] = ()
    smi_gpus: tuple[str, ...] = ()
    smi_links: tuple[tuple[str, ...], ...] = ()
    smi_failure: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> "Report":
        """From JSON; fields that are not known here are left out."""
        held = json.loads(text)
        return cls(**{each.name: held[each.name] for each in fields(cls) if each.name in held})


def diagnose(rank: int, world_size: int, timeout_seconds: float) -> list[Finding] | None:
    """Looks at this process, and if a launcher set RANK, at all ranks. Needs no process group; collective over ranks.

    Args:
        rank: this process's global rank.
        world_size: number of ranks.
        timeout_seconds: how long rank 0 waits for the others, and they for its store.

    Returns:
        What rank 0 found; None on the other ranks.

    Raises:
        TransportError: this is not rank 0, and the rendezvous store cannot be reached.
    """
    reports, more = {rank: look()}, list[Finding]()
    if "RANK" in os.environ:
        try:
            store = meet(rank, world_size, timeout_seconds)
        except TransportError as error:
            if rank > 0:
                raise
            more.append(Finding("rendezvous", str(error), "fault", _OPEN))
        else:
            gathered = gather(store, rank, world_size, reports[rank], timeout_seconds)
            if gathered is None:
                return None
            reports = gathered
            more.append(Finding("rendezvous", f"{_address()} answers"))
    elif "MASTER_ADDR" in os.environ:
        more.append(_reached(reach()))
    return examine(reports, world_size) + more


# ---- looking ---------------------------------------------------------------------------------------------------------


def look() -> Report:
    """What this process sees."""
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    calls = [call for call in CALLS if call.device == "cpu" or gpus]
    versions = {"torch": torch.__version__, "usp": usp.__version__, "Python": platform.python_version()}
    if torch.cuda.is_available() and dist.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, nccl.version()))
    smi_gpus, smi_links, smi_failure = _nvidia_smi() if os.environ.get("LOCAL_RANK", "0") == "0" else ((), (), "")
    return Report(
        host=socket.gethostname(),
        addresses=_addresses(socket.gethostname()),
        interfaces=tuple(name for _, name in socket.if_nameindex() if _is_up(name)),
        versions=versions,
        cuda=torch.version.cuda or torch.version.hip or "",
        backends=tuple(name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()),
        gpus=tuple(gpus),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        kernels=tuple(
            (call.device, name, kernels.load(name).refuses(call)) for call in calls for name in kernels.names()
        ),
        chosen=tuple((call.device, *_chosen(call)) for call in calls),
        smi_gpus=smi_gpus,
        smi_links=smi_links,
        smi_failure=smi_failure,
        environment={
            name: value.encode("utf-8", "backslashreplace").decode()[:200]
            for name, value in sorted(os.environ.items())
            if name in VARIABLES or name.startswith(tuple(PREFIXES))
        },
    )


def _chosen(call: Call) -> tuple[str, bool]:
    try:
        return f"{kernels.select(kernels.candidates('auto'), call)} takes {call}", True
    except KernelError as error:
        return str(error), False


def _addresses(host: str) -> tuple[str, ...]:
    try:
        return tuple(dict.fromkeys(str(address[0]) for *_, address in socket.getaddrinfo(host, None)))
    except (OSError, UnicodeError):
        return ()


def _is_up(interface: str) -> bool:
    """As far as the system says: Linux does."""
    try:
        return Path("/sys/class/net", interface, "operstate").read_text().strip() != "down"
    except OSError:
        return True


def _nvidia_smi() -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], str]:
    """The names of its GPUs, a row of links for each, and why it does not answer; nothing where it is not installed."""
    texts = []
    for options in (["-L"], ["topo", "-m"]):
        try:
            done = subprocess.run(
                ["nvidia-smi", *options], capture_output=True, text=True, errors="replace", timeout=SMI_SECONDS
            )
        except FileNotFoundError:
            return (), (), ""
        except (OSError, subprocess.TimeoutExpired) as error:
            return (), (), str(error)
        if done.returncode:
            return (), (), " ".join((done.stdout + done.stderr).split())[:300] or f"exit code {done.returncode}"
        texts.append(re.sub(r"\x1b\[[0-9;]*m", "", done.stdout))
    names = tuple(re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", texts[0], re.MULTILINE))
    rows = [[cell.strip() for cell in row.split("\t")] for row in re.findall(r"^GPU\d+\t.*$", texts[1], re.MULTILINE)]
    return names, tuple(tuple(row[1 : len(rows) + 1]) for row in rows), ""


# ---- meeting ---------------------------------------------------------------------------------------------------------

_OPEN = "start all ranks with the same MASTER_ADDR and MASTER_PORT, and let the hosts' firewalls pass that port"


def _address() -> str:
    return f"MASTER_ADDR={os.environ.get('MASTER_ADDR', '')} MASTER_PORT={os.environ.get('MASTER_PORT', '')}"


def reach() -> Exception | None:
    """Connects to the rendezvous address: what prevents it, within `CONNECT_SECONDS`."""
    port = os.environ.get("MASTER_PORT", "")
    if not re.fullmatch(r"\d{1,5}", port, re.ASCII) or not 0 < int(port) < 2**16:  # a larger one would wrap around
        return ValueError("a port is a number from 1 to 65535")
    try:
        socket.create_connection((os.environ.get("MASTER_ADDR", ""), int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return error
    return None


def _reached(error: Exception | None) -> Finding:
    """Where no launcher started this process, nobody need listen yet."""
    if error is None:
        return Finding("rendezvous", f"{_address()} answers")
    if isinstance(error, ConnectionRefusedError):
        return Finding("rendezvous", f"{_address()}: nobody listens", "note", "before rank 0 has started, all is well")
    return Finding("rendezvous", f"{_address()}: {error}", "fault", _OPEN)


def meet(rank: int, world_size: int, timeout_seconds: float) -> Store:
    """The rendezvous store, without waiting for other ranks: torchrun's, or else one that rank 0 keeps.

    Raises:
        TransportError: it cannot be reached, or kept, within the time-out.
    """
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline = time.monotonic() + timeout_seconds
    while not keeps and (error := reach()) is not None:
        lasting = not isinstance(error, OSError)  # such as what is no port
        if lasting or time.monotonic() > deadline:
            raise TransportError(f"rank {rank} on {socket.gethostname()} cannot reach {_address()}: {error}")
        time.sleep(0.2)
    try:
        return TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, keeps,
            timeout=timedelta(seconds=timeout_seconds), wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise TransportError(f"rank {rank} has no store at {_address()}: {str(error).splitlines()[0]}") from None


def gather(store: Store, rank: int, world_size: int, mine: Report, timeout_seconds: float) -> dict[int, Report] | None:
    """The reports of the ranks that come within the time-out, on rank 0; the others do not wait."""
    key = f"usp/doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if rank > 0:
        store.set(f"{key}/{rank}", json.dumps(asdict(mine)))
        return None
    keys = {other: f"{key}/{other}" for other in range(1, world_size)}
    with suppress(RuntimeError):  # DistStoreError is one: that not all came
        store.wait(list(keys.values()), timedelta(seconds=timeout_seconds))
    came = [other for other in keys if store.check([keys[other]])]
    return {0: mine} | {other: Report.of(store.get(keys[other]).decode()) for other in came}


# ---- judging ---------------------------------------------------------------------------------------------------------


def examine(reports: Mapping[int, Report], world_size: int) -> list[Finding]:
    """What the reports of some of the ranks say, of which there are `world_size`."""
    hosts: dict[str, dict[int, Report]] = defaultdict(dict)
    for rank, report in sorted(reports.items()):
        hosts[report.host][rank] = report
    found = [*_ranks(hosts, world_size), *_versions(reports)]
    alone = len(hosts) == 1 and len(reports) == world_size > 1
    which = "all" if alone else "some" if len(hosts) > 1 else "unknown"
    each: dict[Finding, list[str]] = defaultdict(list)
    for host, ranks in hosts.items():
        for finding in chain(_host(ranks), _network(next(iter(ranks.values())), which)):
            each[finding].append(host)
    for finding, names in each.items():
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        found.append(finding if len(names) == len(hosts) else replace(finding, where=", ".join(names[:SHOWN]) + more))
    return found + list(_variables(reports))


def _ranks(hosts: Mapping[str, Mapping[int, Report]], world_size: int) -> Iterator[Finding]:
    came = {rank: host for host, ranks in hosts.items() for rank in ranks}
    if missing := [rank for rank in range(world_size) if rank not in came]:
        yield Finding(
            "ranks", f"{spelled(missing)} of {world_size} did not report in time", "fault",
            "look at what those processes print: they may not have started, or still import torch; --timeout waits "
            "longer",
        )  # fmt: skip
    elif world_size > 1:
        told = f"{world_size} on {_counted(len(hosts), 'host')}"
        try:
            by_node([came[rank] for rank in range(world_size)])
        except TopologyError as error:
            yield Finding("ranks", told, "note", str(error)[:300])
        else:
            yield Finding("ranks", f"{told}, {world_size // len(hosts)} on each")


def _versions(reports: Mapping[int, Report]) -> Iterator[Finding]:
    mixed = False
    for name in dict.fromkeys(name for report in reports.values() for name in report.versions):
        by_value = _by_value(reports, lambda report, name=name: report.versions.get(name, "none"))
        if len(by_value) > 1:
            mixed = True
            yield Finding(
                f"{name} version", _told(by_value), "fault",
                "install the same everywhere: other versions may send other bytes, in another order",
            )  # fmt: skip
    if not mixed:
        versions = next(iter(reports.values())).versions
        yield Finding("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))


def _host(ranks: Mapping[int, Report]) -> Iterator[Finding]:
    """Of one host, from the reports of its ranks."""
    first, number = next(iter(ranks.values())), len(ranks)
    lacks_nccl = first.gpus and "nccl" not in first.backends
    yield Finding(
        "backends", ", ".join(first.backends) or "none", "fault" if lacks_nccl or not first.backends else "ok",
        "install a torch that is built with NCCL: gloo moves GPU tensors through the host" if lacks_nccl else "",
    )  # fmt: skip
    yield _devices(first)
    for seen, sharing in _by_value(ranks, lambda report: report.environment.get("CUDA_VISIBLE_DEVICES")).items():
        gpus = len(ranks[sharing[0]].gpus)
        if 0 < gpus < len(sharing):
            yield Finding(
                "ranks per GPU", f"{len(sharing)} ranks share {_counted(gpus, 'GPU')}"
                + (f" (CUDA_VISIBLE_DEVICES={seen})" if seen is not None else ""),
                "fault", f"start one rank for each GPU: --nproc-per-node {gpus}",
            )  # fmt: skip
    for device, told, taken in first.chosen:
        slow = told.startswith("reference ")
        yield Finding(
            f"kernel='auto' on {device}", told, "ok" if taken and not slow else "note" if taken else "fault",
            "the reference kernel is slow" if slow else "",
        )  # fmt: skip
    for device, name, reason in first.kernels:
        yield Finding(f"kernel={name!r} on {device}", reason or "usable")
    if first.smi_failure:
        hung = "timed out" in first.smi_failure
        advice = "a GPU or its driver hangs: look at dmesg" if hung else "without GPUs here, all is well"
        yield Finding("nvidia-smi", first.smi_failure, "fault" if hung or first.gpus else "note", advice)
    if len(first.smi_links) > 1:
        yield _links(first.smi_links)
    if number > 1:
        set_to = first.environment.get("OMP_NUM_THREADS")
        fits = number * first.threads <= first.cores
        yield Finding(
            "threads", f"{number} ranks of {_counted(first.threads, 'thread')} on {_counted(first.cores, 'core')}"
            + (", OMP_NUM_THREADS is not set" if set_to is None else ""),
            "ok" if fits and set_to is not None else "note",
            "" if fits and set_to is not None else f"set OMP_NUM_THREADS={max(1, first.cores // number)}",
        )  # fmt: skip


def _devices(first: Report) -> Finding:
    if first.gpus:
        return Finding("devices", ", ".join(f"{n} x {name}" for name, n in Counter(first.gpus).items()))
    if not first.smi_gpus:
        return Finding("devices", f"CPU, {_counted(first.cores, 'core')}")
    listed = f"nvidia-smi lists {_counted(len(first.smi_gpus), 'GPU')} and torch sees none"
    hidden = first.environment.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return Finding("devices", listed, "note", f"CUDA_VISIBLE_DEVICES={hidden} hides them: unset it to use them")
    advice = f"the driver may be too old for CUDA {first.cuda}" if first.cuda else "install a torch built for CUDA"
    return Finding("devices", listed, "fault", advice)


def _links(rows: tuple[tuple[str, ...], ...]) -> Finding:
    pairs = [(i, j) for i, j in combinations(range(len(rows)), 2) if j < len(rows[i])]
    kinds = Counter(rows[i][j] for i, j in pairs)
    matrix = "\n".join(" ".join(f"{cell:>5}" for cell in (f"GPU{i}", *row)) for i, row in enumerate(rows))
    told = ", ".join(f"{kind}: {_counted(n, 'pair')}" for kind, n in kinds.most_common()) + "\n" + matrix
    if all(kind.startswith("NV") for kind in kinds):
        return Finding("links", told)
    advice = "not every pair has NVLink: measure with `usp probe`, and let `usp plan --cluster` choose the degrees"
    return Finding("links", told, "note", advice)


def _network(report: Report, hosts: Literal["all", "some", "unknown"]) -> Iterator[Finding]:
    """Of one host: it has "all" ranks, "some" of them, or that is "unknown"."""
    known, names = set(report.interfaces), [name for name in report.interfaces if not name.startswith("lo")]
    gloo, nccl = (report.environment.get(f"{kind}_SOCKET_IFNAME") for kind in ("GLOO", "NCCL"))
    for variable, wanted in (("GLOO_SOCKET_IFNAME", gloo), ("NCCL_SOCKET_IFNAME", nccl)):
        if wanted and not _matches(wanted, known, exact=variable[0] == "G"):
            yield Finding(
                variable, f"{wanted} is none of {', '.join(report.interfaces)}", "fault", f"set it to one of {names}"
            )
    if gloo is None:
        told = (
            f"the host name resolves to {', '.join(report.addresses)}"
            if report.addresses
            else "the host name is unknown"
        )
        local = not report.addresses or report.addresses[0].startswith(("127.", "::1"))  # gloo takes the first
    else:
        told, local = f"GLOO_SOCKET_IFNAME={gloo}", gloo.startswith("lo")
    advice = f"set GLOO_SOCKET_IFNAME (here: {', '.join(names)}), or give the host name its address in /etc/hosts"
    if not local or hosts == "all":
        yield Finding(
            "where gloo listens", "this host alone, which has all ranks" if local else "where other hosts come"
        )
    elif hosts == "some":
        yield Finding("where gloo listens", f"{told}: no other host can come there", "fault", advice)
    else:
        yield Finding("where gloo listens", f"{told}: ranks on other hosts could not come", "note", advice)
    unset = [name for name, value in (("GLOO_SOCKET_IFNAME", gloo), ("NCCL_SOCKET_IFNAME", nccl)) if value is None]
    if len(names) > 1 and unset and hosts != "all":
        advice = f"if ranks wait for each other, set {' and '.join(unset)} to the interface that the hosts share"
        yield Finding("interfaces", ", ".join(names), "note", advice)
    else:
        yield Finding("interfaces", ", ".join(names) or "loopback only")


def _matches(wanted: str, known: Iterable[str], exact: bool) -> bool:
    """Whether an interface is among those that a variable names: exactly, or by NCCL's ^ (not), = (exactly), prefix."""
    if exact:
        return all(name in known for name in wanted.split(","))
    bare = wanted.lstrip("^=").split(",")
    hits = [name in bare if "=" in wanted[:2] else name.startswith(tuple(bare)) for name in known]
    return not all(hits) if wanted.startswith("^") else any(hits)


def _variables(reports: Mapping[int, Report]) -> Iterator[Finding]:
    for name in sorted({name for report in reports.values() for name in report.environment}):
        by_value = _by_value(reports, lambda report, name=name: report.environment.get(name))
        prefix = max((p for p in PREFIXES if name.startswith(p)), key=len, default="")
        does = VARIABLES.get(name) or PREFIXES[prefix]
        if len(by_value) > 1 and name != "CUDA_VISIBLE_DEVICES":
            advice = "unless their hosts differ in it, set it to the same on all ranks"
            yield Finding(name, f"{_told(by_value)} ({does})", "note", advice)
        elif any((name, value) in SLOW for value in by_value):
            yield Finding(
                name, f"{_told(by_value)} ({does})", "note", "unset it, unless you look for a fault: it costs time"
            )
        else:
            yield Finding(name, f"{_told(by_value)} ({does})")


def _by_value(reports: Mapping[int, Report], get: Callable[[Report], Hashable]) -> dict[Any, list[int]]:
    """The ranks that have each value."""
    found: dict[Any, list[int]] = defaultdict(list)
    for rank, report in reports.items():
        found[get(report)].append(rank)
    return found


def _told(by_value: Mapping[str | None, list[int]]) -> str:
    """The value, or where there are several, each with its ranks."""
    texts = {"not set" if value is None else value: ranks for value, ranks in by_value.items()}
    return next(iter(texts)) if len(texts) == 1 else "; ".join(f"{v} on {spelled(r)}" for v, r in texts.items())


def spelled(ranks: Iterable[int]) -> str:
    """Ascending ranks in words: "rank 3", "ranks 0-2, 7"."""
    ranks = list(ranks)
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    text = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
