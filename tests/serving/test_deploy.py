"""The files in deploy/ name flags, routes and metrics that the server has, and it runs on Ray Serve."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvllm.entrypoints import serve as command
from tests.helpers.processes import run_python
from tests.helpers.server import ServerProcess

DEPLOY = Path(__file__).parents[2] / "deploy"


def parse(flags: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_arguments(parser)
    return parser.parse_args(flags)


def pod() -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (deployment,) = (each for each in documents if each["kind"] == "Deployment")
    return deployment["spec"]["template"]["spec"]


def test_the_flags_of_the_container_are_those_of_the_command() -> None:
    (container,) = pod()["containers"]
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)[1])
    args = parse(entry[2:] + container["args"])
    assert args.host == "0.0.0.0" and args.compression.policy.name == "pressure"
    mounts = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
    assert {Path(args.model).parent, args.api_key_file.parent} <= set(mounts)
    assert pod()["terminationGracePeriodSeconds"] > args.shutdown_timeout


def test_the_flags_of_the_unit_are_those_of_the_command() -> None:
    text = (DEPLOY / "kvllm.service").read_text()
    start = shlex.split(re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)[1])
    args = parse(start[2:])
    assert int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[1]) > args.shutdown_timeout


def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze: apt-get install systemd")
    text = (DEPLOY / "kvllm.service").read_text()
    (tmp_path / "kvllm.service").write_text(text.replace("/opt/kvllm/bin/kvllm", sys.executable))  # it has to exist
    command = ["systemd-analyze", "verify", str(tmp_path / "kvllm.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_pod_runs_as_the_user_of_the_image() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    (user,) = re.findall(r"^USER (\d+)$", dockerfile, re.MULTILINE)
    assert f"useradd --uid {user} " in dockerfile and pod()["securityContext"]["runAsUser"] == int(user)


def test_the_image_is_built_of_files_that_are_there() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.MULTILINE) for name in line.split()
    ]
    assert {"csrc", "kvllm", "pyproject.toml", "setup.py"} <= set(copied)
    assert all((DEPLOY.parent / name).exists() for name in copied)


def test_the_probes_ask_for_routes_that_need_no_key(server: ServerProcess) -> None:
    (container,) = pod()["containers"]
    paths = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"/health", "/version"}
    assert {server.request(path)[0] for path in paths} == {200}


def test_the_board_shows_metrics_that_the_server_has(server: ServerProcess) -> None:
    server.json("/v1/completions", {"prompt": "2", "max_tokens": 2})
    text = server.request("/metrics")[2].decode()
    board = json.loads((DEPLOY / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for query in queries for name in re.findall(r"(?:k?v?llm|vllm):\w+", query)}
    assert len(names) >= 12
    known = set(re.findall(r"^([\w:]+)", text, re.MULTILINE))
    assert names - known == set()


def answer_on_ray_serve() -> None:
    """Print the status, and the last event of a stream, of a server that Ray Serve runs."""
    import ray
    from ray import serve

    from kvllm.entrypoints.ray_serve import build_app

    ray.init("local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": ":".join(sys.path)}})
    serve.start(http_options={"port": 18767})
    serve.run(build_app({"block_size": "16", "kv_cache_memory_bytes": "64M"}), name="kvllm")
    body = json.dumps({"prompt": "2", "max_tokens": 2, "stream": True}).encode()
    request = urllib.request.Request(
        "http://127.0.0.1:18767/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = [answer.status, answer.read().decode().split()[-1]]
    serve.shutdown()
    print(json.dumps(found))


@pytest.mark.long
def test_the_server_runs_on_ray_serve() -> None:
    pytest.importorskip("ray.serve", reason="the packages of ray[serve] are not installed", exc_type=ImportError)
    assert run_python("answer_on_ray_serve()", __name__) == [200, "[DONE]"]


def test_arguments_of_a_deployment_are_flags() -> None:
    pytest.importorskip("ray.serve", reason="the packages of ray[serve] are not installed", exc_type=ImportError)
    from kvllm.entrypoints.ray_serve import flags_of

    arguments = {"model": "x", "max_model_len": "4k", "enforce_eager": "true", "enable_prefix_caching": "false"}
    args = parse(flags_of(arguments))
    assert (args.model, args.max_model_len) == ("x", 4000)
    assert args.enforce_eager is True and args.enable_prefix_caching is False
