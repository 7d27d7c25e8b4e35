"""Files that the library reads and writes: of bounded size in, whole or not at all out, and an error in one line."""

import os
import secrets
import stat
from pathlib import Path

from usp.errors import InputError

MOST_BYTES = 2**20
"""Of a file that is read: hundreds of times a cluster file, or the lengths of a hundred thousand documents."""


def read(path: str | Path) -> str:
    """The text of a UTF-8 file. No more than `MOST_BYTES` are ever read, whatever the path is.

    Raises:
        InputError: it cannot be read, is larger, or is not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) <= MOST_BYTES:
            return content.decode("utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {named(path)}: {_reason(error)}") from None
    raise InputError(f"cannot read {named(path)}: it has more than {MOST_BYTES:,} bytes, and is no such file then")


def write(path: str | Path, content: str | bytes) -> None:
    """Writes a file under another name in the same folder, which then takes the place of what was there.

    What was there stays as it is if anything fails, and nobody sees a part of the new content. A link is followed;
    what is no regular file (a pipe, /dev/stdout) has no such place, and is written to.

    Raises:
        InputError: it cannot be written.
    """
    content = content.encode("utf-8") if isinstance(content, str) else content
    try:
        target = os.path.realpath(path)
        mode = os.stat(target).st_mode if os.path.exists(target) else None
        if mode is not None and not stat.S_ISREG(mode):
            with open(path, "wb") as file:
                file.write(content)
            return
        beside = os.path.join(os.path.dirname(target), f".usp-{secrets.token_hex(8)}.part")
        try:
            with open(beside, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if mode is not None:
                os.chmod(beside, stat.S_IMODE(mode))
            os.replace(beside, target)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {named(path)}: {_reason(error)}") from None


def named(path: str | Path) -> str:
    """A path, or another text, for a message of one line."""
    text = str(path)
    return text if text.isprintable() and text else repr(text)


def _reason(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or error)
