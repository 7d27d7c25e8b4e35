"""Commands for the shell: one file each, a function called like its command."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from usp.cli import check, doctor, dry_run, explain, plan, probe, simulate, topology, trace
from usp.cli.options import grouped
from usp.errors import USPError

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def usp(show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Hybrid Ulysses + Ring sequence parallelism."""
    if show_version:
        typer.echo(version("usp-attention"))
        raise typer.Exit


app.command(epilog=plan.EXAMPLES)(grouped(plan.plan))
app.command(epilog=simulate.EXAMPLES)(grouped(simulate.simulate))
app.command("dry-run", epilog=dry_run.EXAMPLES)(grouped(dry_run.dry_run))
app.command(epilog=topology.EXAMPLES)(topology.topology)
app.command(epilog=explain.EXAMPLES)(grouped(explain.explain))
app.command(epilog=probe.EXAMPLES)(probe.probe)
app.command(epilog=trace.EXAMPLES)(grouped(trace.trace))
app.command(epilog=doctor.EXAMPLES)(doctor.doctor)
app.command(epilog=check.EXAMPLES)(grouped(check.check))


def main() -> None:
    """Entry point: an error of the library is one line (or table) and exit code 1."""
    try:
        app()
    except USPError as error:
        typer.echo(f"usp: {error}", err=True)
        sys.exit(1)
