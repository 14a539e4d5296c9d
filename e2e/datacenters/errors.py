"""The one class of what can go wrong here: a caller catches `DatacentersError` and shows its message to a person."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

OUTPUT_SHOWN = 2000
"""Characters of a failed program's last output that a message holds."""


class DatacentersError(Exception):
    """Something that a person has to know: the message says what failed, and what would put it right where we know."""


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """What the system or a program refused comes out of this block (or decorated function) as a DatacentersError."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        said = as_text(error.stderr) or as_text(error.stdout)
        tail = f":\n{said[-OUTPUT_SHOWN:]}" if said else ""
        raise DatacentersError(f"{command_text(error.cmd)} failed with status {error.returncode}{tail}") from error
    except subprocess.TimeoutExpired as error:
        raise DatacentersError(f"{command_text(error.cmd)} did not end in {error.timeout:g} s") from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise DatacentersError(f"{where}{error.strerror or error}") from error


def command_text(command: object) -> str:
    """A command line as one would type it, cut short."""
    words = command if isinstance(command, (list, tuple)) else [command]
    return " ".join(map(str, words))[:300]


def as_text(output: object) -> str:
    """What a program printed, however it was captured."""
    return (output.decode(errors="replace") if isinstance(output, bytes) else str(output or "")).strip()
