"""Values of flags: what cannot be is refused in one line, with status 2, before anything starts."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path


def port(text: str) -> int:
    """A TCP port."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= number <= 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: give a number from 1 to 65535")
    return number


def seconds(text: str) -> float:
    """A time above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: give a number of seconds above 0")
    return number


def positive(text: str) -> float:
    """A number above 0."""
    number = _finite(text)
    if number is None or number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def at_least_zero(text: str) -> float:
    """A number, 0 or above."""
    number = _finite(text)
    if number is None or number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 0 or above")
    return number


def _finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def picture(text: str) -> Path:
    """A file to draw into."""
    path = Path(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} is no picture: the name must end in .png or .svg")
    return path


def count(text: str) -> int:
    """A whole number above 0."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def label(text: str) -> str:
    """A name as Kubernetes has it for namespaces, and we for datacenters."""
    from prfaas.api.common import DNS_LABEL

    if not re.fullmatch(DNS_LABEL, text) or len(text) > 63:
        raise argparse.ArgumentTypeError(f"{text!r} is no name: give up to 63 of a-z, 0-9 and -, no - at the ends")
    return text


def existing_file(text: str) -> Path:
    """A file that is there."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text}: {'is no file' if path.exists() else 'there is no such file'}")
    return path


def kubeconfig_file(text: str) -> Path:
    """A file that is there and may be a kubeconfig. What it holds is never quoted: there are secrets in it."""
    path = existing_file(text)
    if problem := _no_kubeconfig(path):
        raise argparse.ArgumentTypeError(f"{text}: {problem}")
    return path


def _no_kubeconfig(path: Path) -> str | None:
    """Why a file is no kubeconfig, as far as one sees from outside."""
    import yaml

    try:
        document = yaml.safe_load(path.read_bytes())
    except OSError as error:
        return error.strerror or "cannot be read"
    except (yaml.YAMLError, UnicodeDecodeError):
        return "is no kubeconfig: not YAML"
    return None if isinstance(document, dict) else "is no kubeconfig: not a mapping"


def users_kubeconfig(environment: Mapping[str, str] = os.environ) -> Path:
    """What kubectl would read: $KUBECONFIG (one file, or several joined by `:`, which are merged), or the file at home.

    Raises ValueError when there is none, or one is no kubeconfig; what it says names the file.
    """
    named = environment.get("KUBECONFIG")
    listed = named or str(Path.home() / ".kube" / "config")
    parts = [Path(part).expanduser() for part in listed.split(os.pathsep) if part]
    there = [part for part in parts if part.is_file()]
    if not there:
        where = "KUBECONFIG names" if named else "KUBECONFIG is not set, and its default is"
        raise ValueError(f"no kubeconfig: {where} {listed}, which does not exist; give --kubeconfig")
    for part in there:
        if problem := _no_kubeconfig(part):
            raise ValueError(f"{part}: {problem}")
    return Path(listed)
