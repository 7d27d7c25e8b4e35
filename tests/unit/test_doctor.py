"""`usp doctor`: every fault, provoked, and that a healthy machine has none."""

import json
import os
import socket
import subprocess
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore
from typer.testing import CliRunner

from usp import doctor, kernels
from usp.cli.app import app
from usp.cli.processes import place
from usp.doctor import Finding, Report, examine, gather, look, meet, reach, spelled
from usp.errors import InputError, TransportError

HEALTHY = Report(
    host="a", addresses=("10.0.0.1",), interfaces=("lo", "eth0"),
    versions={"torch": "2.13", "usp": "1", "Python": "3.12"}, cuda="12.8",
    backends=("gloo", "nccl"), gpus=("H100",) * 2, cores=8, threads=2,
    chosen=(("cuda", "sdpa takes it", True),), smi_gpus=("H100",) * 2, smi_links=(("X", "NV18"), ("NV18", "X")),
    environment={"OMP_NUM_THREADS": "2"},
)  # fmt: skip
"""One of two ranks on a host of two GPUs."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """No launcher, and no nvidia-smi but a test's own."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") or name.startswith(("TORCHELASTIC", "LOCAL_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(subprocess, "run", absent)


def absent(*_, **__):
    raise FileNotFoundError("nvidia-smi")


def world(*hosts: str, **changes) -> dict[int, Report]:
    """Two ranks on each host."""
    return {
        rank: replace(HEALTHY, host=host, **changes) for rank, host in enumerate(h for h in hosts for _ in range(2))
    }


def wrong(reports: dict[int, Report], world_size: int | None = None) -> list[Finding]:
    return [f for f in examine(reports, world_size or len(reports)) if f.level != "ok"]


def only(reports: dict[int, Report], world_size: int | None = None) -> Finding:
    (finding,) = wrong(reports, world_size)
    return finding


@pytest.mark.parametrize("hosts", ["a", "ab", "abc"])
def test_a_healthy_world_has_no_faults(hosts):
    assert wrong(world(*hosts)) == []
    assert Finding("ranks", f"{2 * len(hosts)} on {len(hosts)} host{'s' * (len(hosts) > 1)}, 2 on each") in examine(
        world(*hosts), 2 * len(hosts)
    )


@pytest.mark.parametrize("name", ["torch", "usp", "Python"])
def test_other_versions_are_a_fault_that_names_the_ranks(name):
    reports = world("a", "b")
    for rank in (1, 3):
        reports[rank] = replace(reports[rank], versions=HEALTHY.versions | {name: "0.9"})
    found = only(reports)
    assert (found.level, found.what) == ("fault", f"{name} version")
    assert found.found == f"{HEALTHY.versions[name]} on ranks 0, 2; 0.9 on ranks 1, 3"


def test_ranks_that_do_not_come_are_named():
    reports = world("a", "b", "c")
    for rank in (2, 3, 5):
        del reports[rank]
    found = only(reports, 8)
    assert (found.level, found.found) == ("fault", "ranks 2-3, 5-7 of 8 did not report in time")


def test_hosts_with_different_numbers_of_ranks():
    reports = world("a", "b")
    del reports[3]
    found = only(reports)
    assert (found.level, found.found) == ("note", "3 on 2 hosts")
    assert "different numbers of ranks (a: 2, b: 1)" in found.advice


@pytest.mark.parametrize(
    ("changes", "level", "what", "words"),
    [
        (dict(gpus=("H100",)), "fault", "ranks per GPU", ["2 ranks share 1 GPU", "--nproc-per-node 1"]),
        (dict(backends=("gloo",)), "fault", "backends", ["gloo", "a torch that is built with NCCL"]),
        (dict(backends=(), gpus=(), smi_gpus=()), "fault", "backends", ["none"]),
        (dict(gpus=()), "fault", "devices", ["nvidia-smi lists 2 GPUs and torch sees none", "too old for CUDA 12.8"]),
        (dict(gpus=(), cuda=""), "fault", "devices", ["torch sees none", "install a torch built for CUDA"]),
        (dict(smi_failure="no driver"), "fault", "nvidia-smi", ["no driver"]),
        (dict(smi_failure="no driver", gpus=(), smi_gpus=()), "note", "nvidia-smi", ["no driver"]),
        (
            dict(smi_failure="timed out after 20 seconds", gpus=(), smi_gpus=()),
            "fault", "nvidia-smi", ["timed out", "hangs", "dmesg"],
        ),
        (dict(smi_links=(("X", "SYS"), ("SYS", "X"))), "note", "links", ["SYS: 1 pair", "GPU1   SYS     X", "NVLink"]),
        (dict(threads=5), "note", "threads", ["2 ranks of 5 threads on 8 cores", "OMP_NUM_THREADS=4"]),
        (dict(environment={}), "note", "threads", ["OMP_NUM_THREADS is not set", "OMP_NUM_THREADS=4"]),
        (dict(chosen=(("cuda", "reference takes it", True),)), "note", "kernel='auto' on cuda", ["slow"]),
        (dict(chosen=(("cuda", "no kernel takes it", False),)), "fault", "kernel='auto' on cuda", ["no kernel takes"]),
    ],
)  # fmt: skip
def test_what_is_wrong_on_a_host(changes, level, what, words):
    found = only(world("a", **changes))
    assert (found.level, found.what, found.where) == (level, what, "")
    assert all(word in f"{found.found} {found.advice}" for word in words), found
    sick = wrong(world("a", "b") | {rank + 2: replace(HEALTHY, host="b", **changes) for rank in range(2)})
    assert (what, "b") in {(finding.what, finding.where) for finding in sick}


def test_gpus_that_a_variable_hides_or_deals_are_no_fault():
    hidden = only(world("a", gpus=(), environment={"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}))
    assert (hidden.level, hidden.what) == ("note", "devices")
    dealt = world("a", gpus=("H100",))
    for rank, report in dealt.items():
        dealt[rank] = replace(report, environment=HEALTHY.environment | {"CUDA_VISIBLE_DEVICES": str(rank)})
    assert wrong(dealt) == []


@pytest.mark.parametrize("addresses", [("127.0.1.1",), ("127.0.0.1", "10.0.0.1"), ("::1",), ()])
def test_a_host_name_that_is_loopback(addresses):
    """The fault of every second cluster: gloo listens where the other hosts cannot come."""
    found = only(world("a", "b", addresses=addresses))
    assert (found.level, found.what) == ("fault", "where gloo listens")
    assert "GLOO_SOCKET_IFNAME (here: eth0)" in found.advice
    assert wrong(world("a", addresses=addresses)) == []
    unknown = only({0: replace(HEALTHY, addresses=addresses)})
    assert (unknown.level, unknown.what) == ("note", "where gloo listens")
    assert wrong(world("a", "b", addresses=addresses, environment=interface(GLOO="eth0"))) == []


def interface(**names: str) -> dict[str, str]:
    return HEALTHY.environment | {f"{kind}_SOCKET_IFNAME": name for kind, name in names.items()}


def test_a_name_that_resolves_last_to_loopback_is_well():
    assert wrong(world("a", "b", addresses=("10.0.0.1", "127.0.0.1"))) == []


@pytest.mark.parametrize(
    ("names", "faults"),
    [
        (dict(GLOO="eth0"), []), (dict(GLOO="eth0,eth1"), []), (dict(GLOO="eth"), ["GLOO_SOCKET_IFNAME"]),
        (dict(GLOO="lo"), ["where gloo listens"]), (dict(GLOO="eth0", NCCL="eth"), []),
        (dict(GLOO="eth0", NCCL="=eth"), ["NCCL_SOCKET_IFNAME"]), (dict(GLOO="eth0", NCCL="=eth1"), []),
        (dict(GLOO="eth0", NCCL="ib0,eth"), []), (dict(GLOO="eth0", NCCL="ib"), ["NCCL_SOCKET_IFNAME"]),
        (dict(GLOO="eth0", NCCL="^lo,docker"), []), (dict(GLOO="eth0", NCCL="^lo,eth"), ["NCCL_SOCKET_IFNAME"]),
        (dict(GLOO="eth0", NCCL="^=eth0"), []),
    ],
)  # fmt: skip
def test_interfaces_that_variables_name(names, faults):
    found = wrong(world("a", "b", interfaces=("lo", "eth0", "eth1"), environment=interface(**names)))
    assert [f.what for f in found if f.level == "fault"] == faults


def test_a_host_with_several_interfaces_is_told_what_to_set():
    many = dict(interfaces=("lo", "eth0", "ib0"))
    found = only(world("a", "b", **many))
    assert (found.level, found.found) == ("note", "eth0, ib0")
    assert "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in found.advice
    assert "set NCCL_SOCKET_IFNAME to" in only(world("a", "b", **many, environment=interface(GLOO="ib0"))).advice
    assert wrong(world("a", **many)) == []  # all ranks are on it


def test_variables_are_told_with_what_they_do():
    set_to = HEALTHY.environment | {"NCCL_DEBUG": "INFO", "NCCL_P2P_DISABLE": "1", "NCCL_NEW": "3", "USP_CHECK": "off"}
    reports = world("a", environment=set_to)
    told = {f.what: f for f in examine(reports, 2)}
    assert told["NCCL_DEBUG"] == Finding("NCCL_DEBUG", "INFO (what NCCL logs)")
    assert told["NCCL_NEW"].found == "3 (read by NCCL)"
    assert told["NCCL_P2P_DISABLE"].level == "note" and "unset it" in told["NCCL_P2P_DISABLE"].advice
    reports[1] = replace(reports[1], environment=HEALTHY.environment | {"NCCL_DEBUG": "INFO", "USP_CHECK": "off"})
    told = {f.what: f for f in examine(reports, 2)}
    assert told["NCCL_NEW"].level == "note" and told["NCCL_NEW"].found.startswith("3 on rank 0; not set on rank 1 (")


def test_of_many_hosts_few_are_listed():
    reports = {rank: replace(HEALTHY, host=f"n{rank}", gpus=() if rank else ("H100",)) for rank in range(20)}
    assert only(reports).where == "n1, n2, n3, n4, n5, n6, n7, n8 and 11 more"


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1, 2, 7], "ranks 0-2, 7"), ([1, 3, 4], "ranks 1, 3-4")]
)
def test_ranks_in_words(ranks, text):
    assert spelled(ranks) == text


# ---- looking ---------------------------------------------------------------------------------------------------------


def test_what_this_process_sees(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "\udcff" + "x" * 500)
    report = look()
    assert report.versions["torch"] == torch.__version__ and report.host == socket.gethostname()
    assert "gloo" in report.backends and report.cores >= 1
    assert {name for device, name, _ in report.kernels if device == "cpu"} == set(kernels.names())
    reasons = {(device, name): reason for device, name, reason in report.kernels}
    assert reasons["cpu", "sdpa"] is None and "FlashAttention runs on cuda" in str(reasons["cpu", "flash_attn"])
    assert report.environment["NCCL_DEBUG"] == "\\udcff" + "x" * 194
    again = Report.of(json.dumps(asdict(report)))
    assert json.dumps(asdict(again)) == json.dumps(asdict(report))
    assert [f.level for f in examine({0: again}, 1)].count("fault") == 0


def test_a_report_of_another_version_is_read_as_far_as_it_goes():
    assert Report.of('{"host": "b", "versions": {"usp": "9"}, "moon": 1}') == Report(host="b", versions={"usp": "9"})


MATRIX = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m\n"
    "GPU0\t X \tNV12\tSYS\t0-47\nGPU1\tNV12\t X \tSYS\t0-47\n\nLegend:\n"
)


def test_nvidia_smi_is_read(monkeypatch):
    texts = {"-L": "GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n", "topo": MATRIX}
    asked = []

    def run(command, **options):
        asked.append(options["timeout"])
        return SimpleNamespace(returncode=0, stdout=texts[command[1]], stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    report = look()
    assert report.smi_gpus == ("NVIDIA H200",) * 2 and report.smi_links == (("X", "NV12"), ("NV12", "X"))
    told = {f.what: f for f in examine({0: report}, 1)}
    assert told["links"].found == "NV12: 1 pair\n GPU0     X  NV12\n GPU1  NV12     X"
    assert asked == [doctor.SMI_SECONDS] * 2
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert look().smi_gpus == () and len(asked) == 2  # one process of a host asks


def test_nvidia_smi_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=9, stdout="no\ndriver", stderr="")
    )
    assert look().smi_failure == "no driver"

    def hang(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "timed out" in look().smi_failure


def test_a_host_name_that_nobody_knows(monkeypatch):
    def unknown(*_):
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert look().addresses == ()


# ---- meeting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "world_size"), [("x", "2"), ("2", "2"), ("-1", "2"), ("0", ""), ("0", "9" * 5000)])
def test_ranks_that_are_none(monkeypatch, rank, world_size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(InputError, match=r"^RANK=.*: a rank is a number from 0 to WORLD_SIZE - 1") as caught:
        place()
    assert len(str(caught.value)) < 300


def usp_doctor(*options: str) -> tuple[int, dict[str, dict]]:
    done = CliRunner().invoke(app, ["doctor", "--json", *options])
    return done.exit_code, {finding["what"]: finding for finding in json.loads(done.stdout)["findings"]}


@pytest.fixture
def listening():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield str(server.getsockname()[1])


def test_the_rendezvous_address_is_tried_where_it_is_set(monkeypatch, listening):
    code, told = usp_doctor()
    assert code == 0 and "rendezvous" not in told
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", listening)
    code, told = usp_doctor()
    assert (code, told["rendezvous"]["level"]) == (0, "ok")
    monkeypatch.setattr(
        socket, "create_connection", lambda *_: (_ for _ in ()).throw(ConnectionRefusedError("refused"))
    )
    code, told = usp_doctor()
    assert (code, told["rendezvous"]["level"]) == (0, "note") and "nobody listens" in told["rendezvous"]["found"]
    monkeypatch.setattr(socket, "create_connection", lambda *_: (_ for _ in ()).throw(TimeoutError("timed out")))
    code, told = usp_doctor()
    assert (code, told["rendezvous"]["level"]) == (1, "fault") and "firewalls" in told["rendezvous"]["advice"]


@pytest.mark.parametrize("port", ["", "http", "65536", "99999", "-1", "0", "9" * 5000])
def test_a_port_that_is_none(monkeypatch, port):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    assert str(reach()) == "a port is a number from 1 to 65535"
    code, told = usp_doctor()
    assert (code, told["rendezvous"]["level"]) == (1, "fault")


def test_a_connection_is_tried_for_a_bounded_time(monkeypatch):
    tried = []
    monkeypatch.setattr(
        socket, "create_connection", lambda address, seconds: tried.append((address, seconds)) or socket.socket()
    )
    monkeypatch.setenv("MASTER_ADDR", "far")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert reach() is None and tried == [(("far", 1234), doctor.CONNECT_SECONDS)]


def test_a_rank_without_a_store_says_so_within_the_time_out(monkeypatch, listening):
    for name, value in dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)
    start = time.monotonic()
    with pytest.raises(TransportError, match=r"^rank 1 on .* cannot reach MASTER_ADDR=127.0.0.1 MASTER_PORT=1: "):
        meet(1, 2, 0.5)
    assert time.monotonic() - start < 5
    monkeypatch.setenv("MASTER_PORT", "http")
    with pytest.raises(TransportError, match="a port is a number"):
        meet(1, 2, 600)
    monkeypatch.setenv("RANK", "0")  # whose own port is taken
    monkeypatch.setenv("MASTER_PORT", listening)
    code, told = usp_doctor("--timeout", "1")
    assert code == 1 and "rank 0 has no store" in told["rendezvous"]["found"]
    assert told["ranks"]["found"] == "rank 1 of 2 did not report in time"


def test_rank_0_keeps_a_store_without_torchrun(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for name, value in dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port).items():
        monkeypatch.setenv(name, value)
    kept = meet(0, 2, 5)
    assert gather(meet(1, 2, 5), 1, 2, replace(HEALTHY, host="b"), 5) is None
    assert {rank: report.host for rank, report in (gather(kept, 0, 2, HEALTHY, 5) or {}).items()} == {0: "a", 1: "b"}


def test_those_that_come_are_gathered_within_the_time_out():
    store, start = HashStore(), time.monotonic()
    gather(store, 2, 4, replace(HEALTHY, host="c"), 60)
    found = gather(store, 0, 4, HEALTHY, 0.3)
    assert found is not None and list(found) == [0, 2] and time.monotonic() - start < 5


def test_text_for_people():
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0 and done.stderr == ""
    assert f"ok    versions: torch {torch.__version__}, usp " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("0 faults, ")
