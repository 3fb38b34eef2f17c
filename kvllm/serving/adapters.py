"""The adapters of a server: models of their own to clients, loaded when it starts or while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from kvllm.engine_args import EngineArgs
from kvllm.errors import ConfigError
from kvllm.lora.files import Adapters
from kvllm.lora.request import Adapter, LoRARequest
from kvllm.serving.bodies import read_json
from kvllm.serving.context import context_of
from kvllm.serving.errors import ApiError, bad_request
from kvllm.worker.adapter_weights import adaptable_shapes


class LoadAdapterRequest(Struct, kw_only=True):
    """load_inplace: whether the adapter takes the place of one of the same name."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterRequest(Struct, kw_only=True):
    """lora_int_id: not looked at, since the name says it."""

    lora_name: str
    lora_int_id: int | None = None


load_decoder = msgspec.json.Decoder(LoadAdapterRequest)
unload_decoder = msgspec.json.Decoder(UnloadAdapterRequest)


def open_modules(args: EngineArgs, modules: Mapping[str, str], served: tuple[str, ...]) -> dict[str, Adapter]:
    """The adapters that a server starts with, by name; nothing is read of the model but its configuration.

    modules: their directories, or ids on a hub. served: names of the model itself. Raises ConfigError, and RequestError
    for an adapter that cannot be used.
    """
    if not modules:
        return {}
    if not args.enable_lora:
        raise ConfigError(f"--lora-modules names {', '.join(modules)}: give --enable-lora, too")
    if taken := sorted(modules.keys() & set(served)):
        raise ConfigError(f"--lora-modules names {', '.join(taken)}, which the model itself is called: choose another")
    adapters = Adapters(adaptable_shapes(args.model_config), args.max_lora_rank)
    return {name: adapters.open(LoRARequest(name, 1, path)) for name, path in modules.items()}


async def load(request: Request) -> Response:
    """Let requests name an adapter as their model."""
    body, state = await _read(request, load_decoder)
    name = body.lora_name
    if name in state.options.served_model_names:
        raise bad_request(f"lora_name={name[:200]!r} is a name of the model itself: choose another", "lora_name")
    if name in state.adapters and not body.load_inplace:
        raise bad_request(f"The lora adapter '{name[:200]}' has already been loaded: set load_inplace", "lora_name")
    state.adapters[name] = await state.llm.open_adapter(LoRARequest(name, 1, body.lora_path))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(request: Request) -> Response:
    """Let no further request name an adapter. Those that run with it go on to their ends."""
    body, state = await _read(request, unload_decoder)
    if state.adapters.pop(body.lora_name, None) is None:
        raise ApiError(404, f"The lora adapter '{body.lora_name[:200]}' cannot be found.", param="lora_name")
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _read(request: Request, decoder: msgspec.json.Decoder[Any]) -> tuple[Any, Any]:
    state = context_of(request).state
    return await read_json(request, decoder, state.pool, state.bodies), state
