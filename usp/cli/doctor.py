"""`usp doctor`: what the processes stand on, and what is wrong there."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from usp.cli.output import AsJson, console, document
from usp.cli.processes import place

if TYPE_CHECKING:
    from usp.doctor import Finding

EXAMPLES = (
    "Examples: `usp doctor` on one host; `torchrun --nproc-per-node 8 -m usp.cli doctor`, with `--nnodes 2` and "
    "torchrun's other options on each of two, for all of them. Exit code 1: there is a fault."
)


def doctor(
    timeout: Annotated[int, typer.Option(min=1, max=3600, help="Seconds to wait for other ranks.")] = 60,
    as_json: AsJson = False,
) -> None:
    """Show versions, devices, kernels, links and the network that attention would run on, and what is wrong there.

    Under torchrun, rank 0 reports on all ranks, and names those that do not come. No process group is made.
    """
    from usp.doctor import diagnose

    findings = diagnose(*place(), timeout)
    if findings is None:
        return
    _show(findings, as_json)
    faults = sum(finding.level == "fault" for finding in findings)
    if as_json:
        document({"faults": faults, "findings": [asdict(finding) for finding in findings]})
    if faults:
        raise typer.Exit(1)


def _show(findings: Sequence["Finding"], as_json: bool) -> None:
    out = console(as_json)
    for finding in findings:
        where = f" (on {finding.where})" if finding.where else ""
        out.print(f"{finding.level:<6}{finding.what}{where}: {finding.found}".replace("\n", "\n        "))
        if finding.advice:
            out.print(f"      -> {finding.advice}")
    counts = {level: sum(finding.level == level for finding in findings) for level in ("fault", "note")}
    out.print("\n" + ", ".join(f"{number} {level}{'s' * (number != 1)}" for level, number in counts.items()))
