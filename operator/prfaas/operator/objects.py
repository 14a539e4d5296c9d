"""Reading one of our own objects: not there, going away, unreadable, or a model.

An object stored by another release may not fit the model. It is contained: its status says so, and nothing else
of it or of others is touched.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from prfaas.api.resource import ApiObject
from prfaas.kube.errors import NotFound
from prfaas.kube.resources import Key, Object
from prfaas.operator.report import report
from prfaas.operator.verdicts import conditions, spec_obstacle, summary
from prfaas.operator.world import KINDS, World
from prfaas.workloads.errors import SpecError

Model = TypeVar("Model", bound=ApiObject)


async def fetch(world: World, key: Key) -> Object | None:
    """The object as it is now; None when it is not there or being deleted. Raises KubeError."""
    try:
        live = await world.client.get(KINDS[key.kind], key.name, key.namespace)
    except NotFound:
        return None
    return None if "deletionTimestamp" in live["metadata"] else live


async def parse(world: World, live: Object, model: type[Model]) -> Model | None:
    """The object as a model; None when it does not fit, which its conditions then say. Raises KubeError."""
    try:
        return model.model_validate(live)
    except ValidationError as error:
        obstacle = spec_obstacle(complaints(error)[0])
        kept = {name: value for name, value in (live.get("status") or {}).items() if name != "conditions"}
        generation = live["metadata"].get("generation", 0)
        verdicts = summary([], obstacle=obstacle, paused=False)
        observed = conditions(verdicts, generation, world.now())
        await report(world, live, kept | {"observedGeneration": generation}, observed)
        return None


_IN_WORDS = {"extra_forbidden": "there is no such field", "missing": "is missing"}


def complaints(error: ValidationError) -> list[SpecError]:
    """What does not fit, each as a person can use it: the path of the field, and what is wrong there."""
    found = []
    for complaint in error.errors(include_url=False, include_context=False, include_input=False):
        path = ""
        for part in complaint["loc"]:
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
        problem = _IN_WORDS.get(complaint["type"]) or complaint["msg"].removeprefix("Value error, ")
        found.append(SpecError(path.lstrip(".") or "spec", problem, "see `kubectl explain` for what is allowed"))
    return found
