"""The server as a deployment of Ray Serve: replicas on several nodes after one address.

    pip install ".[serve]" "ray[serve]"
    serve run kvllm.entrypoints.ray_serve:build_app model=path/to/Qwen3-0.6B served_model_name=qwen

Arguments are the flags of `kvllm serve` with underscores; those that have no value are true or false. Addresses, TLS
and the number of replicas are Ray Serve's (deploy/ray_serve.yaml).
"""

from __future__ import annotations

from typing import NoReturn

from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp

from kvllm.entrypoints import serve as command
from kvllm.entrypoints.parser import Parser
from kvllm.errors import ConfigError
from kvllm.serving.adapters import open_modules
from kvllm.serving.app import make_app
from kvllm.serving.parser_choice import with_parsers
from kvllm.serving.state import ServerState, start_engine

MAX_ONGOING_REQUESTS = 1024
"""Requests that Ray Serve gives to a replica at once. The engine batches and queues them itself."""
SWITCHES = {"true": "--{}", "false": "--no-{}"}


class DeploymentParser(Parser):
    """A parser whose refusals do not end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the arguments of the deployment: {message}")


@serve.deployment(max_ongoing_requests=MAX_ONGOING_REQUESTS)
@serve.ingress()
class KvLLM:
    """A replica: one engine, with the routes of `kvllm serve`."""

    def __init__(self, flags: list[str]) -> None:
        parser = DeploymentParser(prog="kvllm serve")
        command.add_arguments(parser)
        engine_args, options = command.read_options(parser.parse_args(flags))
        adapters = open_modules(engine_args, options.lora_modules, options.served_model_names)
        options = with_parsers(options, engine_args)
        self._state = ServerState(engine_args, options, start_engine(engine_args), adapters)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return make_app(self._state)

    async def check_health(self) -> None:
        """Raises ApiError if the engine has died: Ray Serve starts another replica then."""
        self._state.check_ready()

    def __del__(self) -> None:
        if state := getattr(self, "_state", None):
            state.engine.shutdown()


def build_app(arguments: dict[str, str]) -> Application:
    """The application that `serve run` and configuration files start."""
    return KvLLM.bind(flags_of(arguments))  # type: ignore[attr-defined]


def flags_of(arguments: dict[str, str]) -> list[str]:
    """`{"model": "x", "max_model_len": "4096", "enforce_eager": "true"}` as the flags of `kvllm serve`."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if name == "model":
            flags.append(value)
        elif value in SWITCHES:
            flags.append(SWITCHES[value].format(flag))
        else:
            flags.append(f"--{flag}={value}")
    return flags
