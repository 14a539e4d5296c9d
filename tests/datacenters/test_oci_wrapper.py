"""The OCI wrapper asks for no more than the machine may give, and changes nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from e2e.datacenters import oci_wrapper

ALL = "CapBnd:\t000001ffffffffff\n"
NO_SYS_RESOURCE = "CapInh:\t0000000000000000\nCapBnd:\t000001fffeffffff\nCapAmb:\t0000000000000000\n"


def process() -> dict[str, Any]:
    every = [f"CAP_{name}" for name in oci_wrapper.CAPABILITIES]
    return {
        "args": ["/sbin/init"],
        "capabilities": {"bounding": list(every), "effective": list(every)},
        "oomScoreAdj": -500,
        "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 2048, "soft": 2000}],
    }


def test_a_bounding_set_is_read_bit_by_bit() -> None:
    assert oci_wrapper.missing(ALL) == set()
    assert oci_wrapper.missing(NO_SYS_RESOURCE) == {"CAP_SYS_RESOURCE"}
    assert oci_wrapper.granted("CapBnd:\t0000000000000003\n") == {"CAP_CHOWN", "CAP_DAC_OVERRIDE"}


@given(st.sets(st.sampled_from(oci_wrapper.CAPABILITIES)))
def test_granted_and_missing_are_all(names: set[str]) -> None:
    bits = sum(1 << oci_wrapper.CAPABILITIES.index(name) for name in names)
    status = f"CapBnd:\t{bits:016x}\n"
    assert oci_wrapper.granted(status) == {f"CAP_{name}" for name in names}
    assert oci_wrapper.missing(status).isdisjoint(oci_wrapper.granted(status))


def test_what_is_missing_is_taken_out() -> None:
    reduced = process()
    oci_wrapper.reduce(reduced, oci_wrapper.granted(NO_SYS_RESOURCE), lambda _: 1024)
    for names in reduced["capabilities"].values():
        assert "CAP_SYS_RESOURCE" not in names
        assert "CAP_SYS_ADMIN" in names
    assert reduced["oomScoreAdj"] == 0
    assert reduced["rlimits"] == [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024}]
    assert reduced["args"] == ["/sbin/init"]


def test_where_nothing_is_missing_nothing_changes() -> None:
    reduced = process()
    oci_wrapper.reduce(reduced, oci_wrapper.granted(ALL), lambda _: 1024)
    assert reduced == process()


def test_settings_of_every_runc_command_that_has_some() -> None:
    assert oci_wrapper.settings_file(["--root", "/r", "create", "--bundle", "/b", "id"]) == ("/b/config.json", True)
    assert oci_wrapper.settings_file(["run", "--bundle=/b", "id"]) == ("/b/config.json", True)
    assert oci_wrapper.settings_file(["exec", "--process", "/p.json", "id"]) == ("/p.json", False)
    assert oci_wrapper.settings_file(["delete", "--force", "id"]) is None


def test_it_becomes_runc_with_the_same_arguments(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"process": process(), "root": {"path": "r"}}))
    runc = tmp_path / "runc"
    runc.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments\n')
    runc.chmod(0o755)
    arguments = ["create", "--bundle", str(tmp_path), "box"]
    subprocess.run(
        [sys.executable, "-IS", oci_wrapper.__file__, *arguments],
        env={**os.environ, "PRFAAS_RUNC": str(runc)},
        check=True,
    )
    assert (tmp_path / "arguments").read_text().split() == arguments
    written = json.loads((tmp_path / "config.json").read_text())
    allowed = oci_wrapper.granted(Path("/proc/self/status").read_text())
    assert set(written["process"]["capabilities"]["bounding"]) == allowed
    assert written["root"] == {"path": "r"}
