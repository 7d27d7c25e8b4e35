"""Prints the table of docs/reliability.md: every fault, what a survivor sees, and how long it takes.

python -m tests.faults.table
"""

from tests.faults.job import TIMEOUT
from tests.faults.test_faults import FAULTS, endings


def main() -> None:
    """Provokes every fault once."""
    print(f"Time-out {TIMEOUT.total_seconds():g} s.\n")
    print("| fault | error of the last survivor | seconds until the first and the last error |\n|---|---|---|")
    for fault in FAULTS:
        ends = sorted(
            (end for rank, end in endings(fault).items() if rank != fault.victim), key=lambda end: end.seconds
        )
        print(f"| {fault.name} | `{ends[-1].error}` | {ends[0].seconds:.1f}, {ends[-1].seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
