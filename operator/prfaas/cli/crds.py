"""`prfaas crds`: write the files that are generated from the API's models, or fail where one is not as it should be."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser("crds", help="write the CRDs and the API reference, generated from the models")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not up to date")
    parser.add_argument("--root", type=Path, default=Path(), help="root of the repository (default: here)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write, or compare: 0 when every file is as generated."""
    try:
        return write_or_compare(args)
    except OSError as error:
        print(f"prfaas crds: {error}", file=sys.stderr)
        return 1


def write_or_compare(args: argparse.Namespace) -> int:
    """The same. Raises OSError when a file cannot be read or written."""
    from prfaas.api.crd import files

    texts = files()
    root: Path = args.root
    stale = [path for path, text in texts.items() if not (root / path).exists() or (root / path).read_text() != text]
    folders = {(root / path).parent for path in texts if path.endswith(".yaml")}
    surplus = sorted(
        str(file.relative_to(root))
        for folder in folders
        for file in folder.glob("*.yaml")
        if str(file.relative_to(root)) not in texts
    )
    if args.check:
        for path in stale:
            print(describe(root / path, path, texts[path]), file=sys.stderr)
        for path in surplus:
            print(f"{path}: is generated from no model", file=sys.stderr)
        if stale or surplus:
            print("run `prfaas crds` and commit the result", file=sys.stderr)
        return 1 if stale or surplus else 0
    for path in stale:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(texts[path])
        print(f"{path}: written")
    for path in surplus:
        (root / path).unlink()
        print(f"{path}: removed")
    return 0


def describe(file: Path, path: str, wanted: str) -> str:
    """How a file differs from what it should be: the first few changed lines."""
    if not file.exists():
        return f"{path}: is missing"
    before, after = file.read_text().splitlines(), wanted.splitlines()
    lines = list(difflib.unified_diff(before, after, f"{path} (there)", f"{path} (generated)", n=1, lineterm=""))
    shown = lines[:20] + ([f"... and {len(lines) - 20} more lines"] if len(lines) > 20 else [])
    return f"{path}: differs from the models\n" + "\n".join(shown)
