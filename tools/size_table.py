"""Print the size of the package: per file, per folder, in total.

A line counts as code when it holds a token of the program, as text when it holds only a comment or a part of a
docstring. Blank lines count as nothing.
"""

import ast
import io
import tokenize
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
LAYOUT_TOKENS = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count(source: str) -> tuple[int, int]:
    """The lines of code and the lines of text in one file."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT_TOKENS:
            lines = comments if token.type == tokenize.COMMENT else code
            lines.update(range(token.start[0], token.end[0] + 1))
    blank = {number for number, line in enumerate(source.splitlines(), 1) if not line.strip()}
    code -= docstrings | blank
    return len(code), len((docstrings | comments) - code - blank)


def main() -> None:
    folders: dict[Path, list[tuple[str, int, int]]] = {}
    for path in sorted((ROOT / "usp").rglob("*.py")):
        folders.setdefault(path.parent, []).append((path.name, *count(path.read_text(encoding="utf-8"))))

    files = [file for rows in folders.values() for file in rows]
    table = Table("file", title="size of usp, in lines", show_footer=True, header_style="bold")
    table.columns[0].footer = f"{len(files)} files"
    table.add_column("code", justify="right", footer=str(sum(code for _, code, _ in files)))
    table.add_column("text", justify="right", footer=str(sum(text for _, _, text in files)))
    for folder, rows in sorted(folders.items()):
        totals = sum(code for _, code, _ in rows), sum(text for _, _, text in rows)
        table.add_row(f"{folder.relative_to(ROOT)}/", *map(str, totals), style="bold")
        for name, code, text in rows:
            table.add_row(f"  {name}", str(code), str(text))
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
