"""`prfaas render`: print, without a cluster, what the operator would create for our objects in files."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prfaas.cli.arguments import label
from prfaas.cli.documents import Document, DocumentError, read
from prfaas.cli.operator import add_router_arguments, router_settings

if TYPE_CHECKING:
    from prfaas.operator.config import Config

UNKNOWN_UID = "00000000-0000-0000-0000-000000000000"
"""Stands where children name their owner: the API server gives it when the object is created."""
IMAGE = "ghcr.io/prfaas/prfaas"
OURS = "prfaas.io/"
DESCRIPTION = """\
Print what the operator would create for every PrfaaSCluster and PDCluster in the files, as if it were new. No cluster
is asked. With `-o args`, print the engines' command lines instead, one a line: of each pool, role, and kind of node
where an instance spans several.

An object without a uid shows zeros where its children name their owner; what `kubectl get -o yaml` prints has one.
For an InterClusterLink nothing is created before its peer was read.
"""
EXAMPLE = """\
examples:
  prfaas render -f pdcluster.yaml
  prfaas render -f east/ west/ -o args --role decode
  kubectl get pdcluster h20 -o yaml | prfaas render -f - | kubectl diff --server-side -f -
"""
_VARIABLE = re.compile(r"\$(\$|\((\w+)\))")
"""What the kubelet replaces in a command line."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "render",
        help="print what the operator would create for objects in files",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-f",
        "--filename",
        dest="files",
        action="extend",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files of YAML documents, folders of *.yaml, or - for standard input",
    )
    parser.add_argument("--role", choices=["prefill", "decode"], help="only what belongs to one role")
    parser.add_argument("-o", "--output", choices=["yaml", "args"], default="yaml", help="default: %(default)s")
    parser.add_argument(
        "-n", "--namespace", type=label, default="default", help="of objects that name none (%(default)s)"
    )
    operator = parser.add_argument_group("the operator's installation, as the chart has it")
    operator.add_argument("--cluster-id", type=label, default="here", help="identity of the datacenter (%(default)s)")
    operator.add_argument("--operator-namespace", type=label, default="prfaas-system", help="default: %(default)s")
    operator.add_argument("--exchange-namespace", type=label, default="prfaas-exchange", help="default: %(default)s")
    operator.add_argument("--image", default=None, help=f"image of prfaas (default: {IMAGE} of this version)")
    add_router_arguments(operator)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0, or 1 with what is wrong on standard error, and then nothing on standard output."""
    try:
        documents = read(args.files)
    except DocumentError as error:
        print(f"prfaas render: {error}", file=sys.stderr)
        return 1
    config = _config(args)
    errors: list[str] = []
    pages: list[tuple[str, list[dict[str, Any]]]] = []
    for document in documents:
        match document.kind:
            case "PrfaaSCluster" | "PDCluster":
                objects = list(_pool(document, args.namespace, config, errors))
                pages.append((document.title, [each for each in objects if _has_role(each, args.role)]))
            case "InterClusterLink":
                _check(document, args.namespace, errors)
                _say(f"{document.title}: nothing is created before its peer was read; then the peer's endpoints are")
            case kind if str(document.content.get("apiVersion", "")).startswith(OURS):
                known = "PrfaaSCluster, PDCluster or InterClusterLink"
                errors.append(f"{document.title}: kind: there is no {kind or 'object without a kind'}; write {known}")
            case _:
                _say(f"{document.title}: not an object of the operator's, left out")
    if not errors and not documents:
        errors.append(f"no objects in {', '.join(args.files)}")
    if errors:
        for line in errors:
            _say(line)
        return 1
    if args.output == "args":
        text = "".join(f"{line}\n" for _, objects in pages for line in dict.fromkeys(_command_lines(objects)))
    else:
        text = "".join(_yaml(title, obj) for title, objects in pages for obj in objects)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _say(message: str) -> None:
    print(f"prfaas render: {message}", file=sys.stderr)


def _config(args: argparse.Namespace) -> Config:
    from importlib.metadata import version

    from prfaas.operator.config import Config

    if args.image is None:
        args.image = f"{IMAGE}:{version('prfaas-operator')}"
    return Config(
        cluster_id=args.cluster_id,
        namespace=args.operator_namespace,
        identity="render",
        routers=router_settings(args, args.operator_namespace),
        exchange_namespace=args.exchange_namespace,
    )


def _pool(document: Document, namespace: str, config: Config, errors: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of one pool; what is wrong with it is added to `errors`."""
    from prfaas.operator.render import fresh
    from prfaas.workloads.engines.rules import warnings
    from prfaas.workloads.errors import SpecError

    pool = _check(document, namespace, errors)
    if pool is None:
        return
    try:
        objects = fresh(pool, config)
        for text in warnings(pool.spec):
            _say(f"{document.title}: warning: {text}")
    except SpecError as error:
        errors.append(f"{document.title}: {error}")
        return
    if pool.spec.paused:
        _say(f"{document.title}: spec.paused is true: the operator writes nothing of this until it is false")
    yield from objects


def _check(document: Document, namespace: str, errors: list[str]) -> Any:
    """The document as a model, with what a new object gets from the API server; None when it does not fit."""
    from pydantic import ValidationError

    from prfaas.api.kinds import KINDS
    from prfaas.operator.objects import complaints

    content = dict(document.content)
    if isinstance(content.get("metadata"), dict):
        content["metadata"] = {
            "namespace": namespace,
            "uid": UNKNOWN_UID,
            "generation": 1,
            **content["metadata"],
        }
    try:
        return KINDS[document.kind].model_validate(content)
    except ValidationError as error:
        errors.extend(f"{document.title}: {each}" for each in complaints(error))
        return None


def _has_role(obj: dict[str, Any], role: str | None) -> bool:
    from prfaas.api import labels

    return role is None or obj["metadata"].get("labels", {}).get(labels.ROLE) == role


def _command_lines(objects: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The command line of each engine, as a shell takes it."""
    from prfaas.workloads.engine import CONTAINER
    from prfaas.workloads.engines.interface import engines_own
    from prfaas.workloads.meta import pod_templates

    for obj in objects:
        for template in pod_templates(obj):
            for container in template["spec"]["containers"]:
                if container["name"] == CONTAINER:
                    words = [*engines_own(container.get("command", ())), *container.get("args", ())]
                    yield " ".join(map(shell_word, words))


def shell_word(word: str) -> str:
    """One word of a container's command for a shell: the kubelet's `$(NAME)` becomes the variable NAME."""
    parts = []
    end = 0
    for found in _VARIABLE.finditer(word):
        literal = word[end : found.start()] + ("$" if found[1] == "$" else "")
        parts += [shlex.quote(literal)] if literal else []
        parts += [f'"${{{found[2]}}}"'] if found[2] else []
        end = found.end()
    rest = word[end:]
    return "".join([*parts, shlex.quote(rest)] if rest or not parts else parts)


def _yaml(title: str, obj: dict[str, Any]) -> str:
    import yaml

    return f"---\n# of {title}\n{yaml.safe_dump(obj, sort_keys=False, width=float('inf'), allow_unicode=True)}"
