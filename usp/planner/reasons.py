"""Why a choice is slower than the best one, and what would make a model fit that does not: words for a plan."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from usp.planner.memory import estimate
from usp.planner.problem import MOST_DEVICES, Problem, refusal
from usp.planner.spec import ClusterSpec

if TYPE_CHECKING:
    from usp.planner.plan import Choice

GIB = 2**30
TIE = 1.03
"""Times within this factor of each other are called a tie: the constants of a machine are not known better."""


def explain(problem: Problem, choice: "Choice", ranked: "Sequence[Choice]") -> dict[str, Any]:
    """The fields `slower` and `why` of a choice.

    Args:
        problem: what the plan is made for.
        choice: the choice.
        ranked: all choices, the best first.
    """
    best = ranked[0]
    if not choice.fits:
        largest = sorted(choice.memory.items(), key=lambda row: -row[1])[:2]
        most = " and ".join(f"{size / GIB:.3g} of {name}" for name, size in largest)
        why = f"needs {choice.memory_bytes / GIB:.1f} GiB of {problem.cluster.device.memory_gib:.4g}: {most}"
    elif choice is best:
        why = "the fastest that fits" + _lead(best, ranked)
    else:
        why = ("a tie; " if choice.seconds < best.seconds * TIE else "") + _slower(problem, choice, best)
    return {"slower": choice.seconds / best.seconds, "why": why + _notes(problem, choice)}


def remedies(problem: Problem) -> Iterator[str]:
    """Changes that would make it fit, the cheapest first: of the training, then of the cluster or the sequence."""
    workload, cluster = problem.workload, problem.cluster
    training = {"loss_chunks": 16, "checkpointing": "full"} if workload.mode == "train" else {}
    cheap = {k: v for k, v in {**training, "zero_stage": 3, "batch": 1}.items() if getattr(workload, k) != v}
    enough = {field: value for field, value in cheap.items() if _fits(_changed(problem, **{field: value}))}
    yield from (f"{field}={value}" for field, value in enough.items())
    lean = _changed(problem, **cheap)
    words = "".join(f"{field}={value}, " for field, value in cheap.items())
    if not enough and cheap and _fits(lean):
        yield words.removesuffix(", ")
    if _fits(lean):
        return
    for degree in range(workload.tensor_parallel + 1, cluster.gpus_per_node + 1):
        legal = not refusal(problem.model, cluster, degree, workload.data_parallel)
        if legal and _fits(_changed(lean, tensor_parallel=degree)):
            yield f"{words}tensor_parallel={degree}"
            break
    for nodes in _doubled(cluster):
        if _fits(_grown(lean, nodes)):
            yield f"{words}{nodes} nodes ({nodes * cluster.gpus_per_node} devices)"
            break
    least = max(1, workload.prefix, workload.sinks)
    for shorter in (workload.seq_len >> i for i in range(1, 40)):
        if shorter >= least and not workload.documents and _fits(_changed(lean, seq_len=shorter)):
            yield f"{words}{shorter} tokens"
            break


def _doubled(cluster: ClusterSpec) -> Iterator[int]:
    nodes = cluster.nodes
    while (nodes := 2 * nodes) * cluster.gpus_per_node <= MOST_DEVICES:
        yield nodes


def _changed(problem: Problem, **fields: Any) -> Problem:
    """The same problem with other fields of its workload."""
    return Problem(problem.model, problem.cluster, problem.workload.model_copy(update=fields))


def _grown(problem: Problem, nodes: int) -> Problem:
    """The same problem on more nodes."""
    return Problem(problem.model, problem.cluster.model_copy(update={"nodes": nodes}), problem.workload)


def _fits(problem: Problem) -> bool:
    """Whether some legal degrees fit."""
    legal = [degrees for degrees in problem.degrees if not problem.objection(*degrees)]
    needed = (estimate(problem.model, problem.workload, *degrees).total_bytes for degrees in legal)
    return any(size <= problem.cluster.device.memory_bytes for size in needed)


def _lead(best: "Choice", ranked: "Sequence[Choice]") -> str:
    """How far the next pair of degrees is behind."""
    degrees = best.ulysses_degree, best.ring_degree
    others = (c for c in ranked if c.fits and (c.ulysses_degree, c.ring_degree) != degrees)
    if (other := next(others, None)) is None:
        return ""
    return f"; next is U={other.ulysses_degree} R={other.ring_degree}, {other.seconds / best.seconds - 1:.0%} slower"


def _slower(problem: Problem, choice: "Choice", best: "Choice") -> str:
    """What costs a choice most, beside the best."""
    parts = ("compute", "merge", "ring", "all_to_all")
    lost = {part: getattr(choice, f"seconds_{part}") - getattr(best, f"seconds_{part}") for part in parts}
    part = max(lost, key=lambda part: lost[part])
    spent, instead = (_duration(getattr(c, f"seconds_{part}")) for c in (choice, best))
    ulysses, ring, cluster = choice.ulysses_degree, choice.ring_degree, problem.cluster
    machine = problem.machines[ulysses, ring]
    if lost[part] <= 0:
        return f"as fast, with {choice.transport} and {choice.layout}"
    if part == "all_to_all" and machine.ulysses.crosses:
        across = cluster.inter.speed("all_to_all", machine.ulysses.reach)
        inside = cluster.intra.speed("all_to_all", cluster.gpus_per_node)
        return f"U={ulysses} crosses nodes: all-to-all at {across:g} GB/s instead of {inside:g}"
    if part == "all_to_all":
        speed = cluster.intra.speed("all_to_all", machine.ulysses.devices)
        return f"all-to-all of U={ulysses} at {speed:g} GB/s: {spent} instead of {instead}"
    if part == "ring":
        link, devices = machine.path(machine.ring)
        return f"hops of R={ring} at {link.speed('ring', devices):g} GB/s: {spent} not hidden instead of {instead}"
    if part == "merge":
        why = (
            f"R={ring} joins {ring} blocks"
            if ring > best.ring_degree
            else f"{choice.layout} joins more or larger tiles"
        )
        return f"{why}: {spent} instead of {instead}"
    uneven = problem.imbalance(ring, choice.layout)
    if uneven > 1.02 * problem.imbalance(best.ring_degree, best.layout):
        return f"{choice.layout}: the slowest ranks compute {uneven:.2f} x an even share"
    return f"kernels take {spent} instead of {instead}: shorter blocks or unevenly dealt heads"


def _notes(problem: Problem, choice: "Choice") -> str:
    """What is worth knowing of a choice besides: heads that are dealt unevenly or sent several times."""
    shape, degree = problem.shape, choice.ulysses_degree
    notes = ""
    if shape.heads % degree:
        most, fewest = -(-shape.heads // degree), shape.heads // degree
        notes += f"; {shape.heads} heads on U={degree}: some ranks compute {most}, others {fewest}"
    [(_, layer), *_] = problem.layers(degree, choice.ring_degree, choice.layout, choice.transport)
    if (copies := layer.kv_copies) > 1:
        notes += f"; {shape.kv_heads} kv heads on U={degree}: one goes to up to {copies} ranks"
    return notes


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
