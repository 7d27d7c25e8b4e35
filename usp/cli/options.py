"""Commands with many options take them in groups: dataclasses, each field an option."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it: with all fields of the dataclasses that it takes as options of its own."""
    groups = {name: kind for name, kind in get_type_hints(command).items() if name != "return"}
    hints = {name: hint for kind in groups.values() for name, hint in get_type_hints(kind, include_extras=True).items()}
    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for kind in groups.values()
        for field in fields(kind)
    ]

    @wraps(command)
    def run(**given: Any) -> None:
        command(**{name: kind(**{f.name: given[f.name] for f in fields(kind)}) for name, kind in groups.items()})

    run.__signature__ = Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = hints
    return run
