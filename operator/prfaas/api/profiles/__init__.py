"""The profiles that ship with the package, by file name: `shipped("H20x8")`.

H200x8 and H20x8 were fitted to what arXiv:2604.15039 publishes for its 1T hybrid model on instances of eight GPUs.
RubinCPXx8 (prefill only) and LPUx256 (decode only) are estimates from announcements, `source: assumed`.
"""

from __future__ import annotations

from importlib import resources

import yaml

from prfaas.api.profile import Profile


def shipped_names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    files = [entry.name for entry in resources.files(__name__).iterdir()]
    return sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))


def shipped(name: str) -> Profile:
    """The shipped profile called `name`; KeyError with the known names if there is none."""
    if name not in shipped_names():
        raise KeyError(f"no shipped profile {name!r}; there are {', '.join(shipped_names())}")
    return parse_profile((resources.files(__name__) / f"{name}.yaml").read_text(encoding="utf-8"))


def parse_profile(text: str) -> Profile:
    """A Profile from its YAML (or JSON) text.

    Raises ValueError (pydantic's ValidationError is one) with the path of each wrong field.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from error
    return Profile.model_validate(document)
