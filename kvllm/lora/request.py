"""Which adapter a request is computed with: as users name it, and as the engine knows it."""

from __future__ import annotations

from msgspec import Struct

from kvllm.errors import ConfigError


class LoRARequest(Struct, frozen=True):
    """The adapter of a request, with vLLM's names.

    Args:
        lora_name: for people, and for clients of a server.
        lora_int_id: a number from 1 on. Adapters are told apart by the content of their files, so it has no effect.
        lora_path: the directory that PEFT has written, adapter_config.json and adapter_model.safetensors, or the id of
            one on a hub, ORG/NAME.

    Raises:
        ConfigError: a value is not allowed.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ConfigError(f"lora_name={self.lora_name!r} is not allowed: a string of at least one character")
        if not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise ConfigError(f"lora_int_id={self.lora_int_id!r} is not allowed: an integer of at least 1")
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise ConfigError(f"lora_path={self.lora_path!r} is not allowed: the directory of an adapter, as a string")


class Adapter(Struct, array_like=True, frozen=True):
    """An adapter whose files were checked.

    digest: of the content of both files. Two adapters of one digest are one, and share prefixes and memory. Ranks read
        the files themselves, and refuse others.
    """

    name: str
    path: str
    digest: str
