"""The one list of policies, and what a configuration knows of their options. The classes are in `kvllm/core/policies`.

A policy is one class, which `register_policy` adds to the list: docs/add-a-method.md has the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kvllm.compression.specs import LARGEST, Compresses
from kvllm.config.checks import Options, check_types, require
from kvllm.entry_points import load_entry_points
from kvllm.errors import ConfigError

if TYPE_CHECKING:
    from kvllm.config.compression import CompressionConfig
    from kvllm.core.policies.base import CompressionPolicy
    from kvllm.core.regions import Regions

ENTRY_POINTS = "kvllm.policies"
"""The entry point group of packages with policies. An entry names a module that calls `register_policy`."""
POLICIES: dict[str, type[CompressionPolicy[Any]]] = {}
"""All policies that are known, by name."""
RESERVED: set[str] = set()
"""The names of this package's own."""
Policy = TypeVar("Policy", bound="type[CompressionPolicy[Any]]")


class PolicyOptions(Options, frozen=True, tag_field="name"):
    """The options of a policy that not all policies have. The tag of the struct is the policy's name."""

    compresses: ClassVar[Compresses]
    """What a compression chooses from."""

    def __post_init__(self) -> None:
        check_types(self)
        check_largest(self)

    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)

    def check(self, config: CompressionConfig) -> None:
        """Raises ConfigError for options that do not go with the others of a configuration."""

    def regions(self, config: CompressionConfig, block_size: int, retain: int | None = None) -> Regions:
        """What of a sequence can be compressed, and to how many KV pairs.

        retain: KV pairs kept of a window, where a request or a group of layers says so.

        Raises:
            ConfigError: the options do not fit a block size.
        """
        raise NotImplementedError


def check_largest(options: Options) -> None:
    for field in options.__struct_fields__:
        value = getattr(options, field)
        require(not isinstance(value, int) or value <= LARGEST, field, value, f"at most {LARGEST}")


def register_policy(policy: Policy) -> Policy:
    """Add a policy to the list, by the name of its options. One of another package that has the name is replaced.

    Raises:
        ConfigError: for the name of a policy of this package.
    """
    name = str(policy.options_type.__struct_config__.tag)
    if name in RESERVED:
        raise ConfigError(f"a policy {name!r} is part of KvLLM: register yours by another name")
    POLICIES[name] = policy
    return policy


def policy_type(name: Any) -> type[PolicyOptions]:
    """The options of the policy of that name. Those of other packages are loaded if it is not among the others.

    Raises:
        ConfigError: there is no such policy, or a package with policies cannot be imported.
    """
    if name not in list(POLICIES):
        load_entry_points(ENTRY_POINTS)
    require(name in list(POLICIES), "policy", name, f"choose one of {', '.join(POLICIES)}")
    return POLICIES[name].options_type


def policy_options(given: Any) -> PolicyOptions:
    """Options from themselves, from the name of a policy, or from a mapping with `name`. Raises ConfigError."""
    if isinstance(given, PolicyOptions):
        require(policy_type(given.name) is type(given), "policy", given, "give its class to register_policy first")
        return given
    options = dict(given) if isinstance(given, Mapping) else {"name": given}
    return policy_type(options.pop("name", None))(**options)
