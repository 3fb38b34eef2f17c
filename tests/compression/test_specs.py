"""The list of methods: what it says holds for the functions, the configuration and the policies."""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

import pytest

from kvllm.compression import methods
from kvllm.compression.registry import METHODS, Method
from kvllm.compression.specs import SPECS, MethodSpec, Option
from kvllm.errors import ConfigError
from tests.helpers.compressions import paper_compression, refusal

THRESHOLD = {"policy": "threshold", "threshold_tokens": 64, "budget_tokens": 32, "buffer": 8}


def test_every_method_in_the_folder_is_in_the_list() -> None:
    modules = [import_module(f"{methods.__name__}.{module.name}") for module in iter_modules(methods.__path__)]
    listed = {method.select.__module__ for method in METHODS.values()}
    assert {module.__name__ for module in modules if hasattr(module, "select")} == listed
    assert list(METHODS) == list(SPECS)


@pytest.mark.parametrize("name", SPECS)
def test_a_default_of_the_function_is_that_of_the_list(name: str) -> None:
    arguments = inspect.signature(METHODS[name].select).parameters
    for option in SPECS[name].options:
        assert arguments[option.name].default in (inspect.Parameter.empty, option.default)
        policy = THRESHOLD | {"query_window": 8} if SPECS[name].ragged else {}
        assert paper_compression(method=name, **policy).options[option.name] == option.default


def test_a_function_that_does_not_fit_its_spec_is_refused() -> None:
    with pytest.raises(TypeError, match="option 'sinks' that its function does not take"):
        Method(replace(SPECS["keydiff"], options=(Option("sinks", 4, 0),)))
    with pytest.raises(TypeError, match="method 'plain' needs 'chunk_budget', which is no option"):
        Method(MethodSpec("plain", "", "window", function="kara:select"))


@pytest.mark.parametrize("name", SPECS)
def test_a_policy_takes_the_methods_that_the_list_allows(name: str) -> None:
    spec = SPECS[name]
    recent = {"query_window": 8} if spec.queries == "recent" else {}
    for policy, options in (("threshold", THRESHOLD | recent), ("periodic", {}), ("pressure", {}), ("standalone", {})):
        if reason := refusal(name, policy):
            with pytest.raises(ConfigError, match=f"method='{name}' is not allowed: ") as error:
                paper_compression(method=name, **(options | {"policy": policy}))
            assert reason in str(error.value)
        else:
            protected = {"protect_prompt": True} if policy == "threshold" and spec.reselects else {}
            assert paper_compression(method=name, **(options | protected | {"policy": policy})).spec is spec
    assert (refusal(name, "threshold") is None) == (spec.queries != "window" and not spec.unrotates)
    assert (refusal(name, "periodic") is None) != spec.ragged


@pytest.mark.parametrize("name", SPECS)
def test_the_list_says_which_methods_read_files(name: str) -> None:
    assert SPECS[name].calibrated == ("statistics" in METHODS[name].arguments)
    assert SPECS[name].gated == ("gates" in METHODS[name].arguments)


def test_options_of_a_method() -> None:
    assert paper_compression(method="kara", chunk_budget=3).options == {"chunk_budget": 3, "max_chunk": 8}
    assert paper_compression(method="streaming").options == {"sinks": 4}
    assert paper_compression(method="streaming", method_options={"sinks": 9}).options == {"sinks": 9}
    assert paper_compression(method="rkv", method_options={"mix": 1}).options == {"mix": 1}


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("streaming", {"sink": 4}, "CompressionConfig has no option 'sink'; did you mean sinks?"),
        ("streaming", {"mix": 0.1}, "method='streaming' has sinks; every compression has method"),
        ("keydiff", {"chunk_budget": 32}, "chunk_budget=32 is not allowed: policy='periodic' has window_blocks, "),
        ("keydiff", {"max_chunk": 8}, "method='keydiff' has no option; "),
        ("h2o", {"query_window": 32}, "query_window=32 is not allowed: "),
        ("snapkv", {"chunk_budget": 4}, "method='snapkv' has query_window; "),
        ("kara", {"max_chunk": 2}, "max_chunk=2 is not allowed: at least 3"),
        ("streaming", {"sinks": -1}, "sinks=-1 is not allowed: at least 0, a whole number"),
        ("streaming", {"sinks": 2.5}, "sinks=2.5 is not allowed: at least 0, a whole number"),
        ("streaming", {"sinks": True}, "Expected `int | float`, got `bool`"),
        ("rkv", {"mix": 1.1}, "mix=1.1 is not allowed: between 0.0 and 1.0"),
        ("rkv", {"mix": float("nan")}, "mix=nan is not allowed"),
        ("rkv", {"mix": "0.1"}, "Expected `int | float`, got `str`"),
    ],
)
def test_options_that_a_method_does_not_have_are_refused(method: str, options: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        paper_compression(method=method, method_options=options)
    assert message in str(error.value)
    with pytest.raises(ConfigError) as beside:
        paper_compression(method=method, **options)
    assert str(beside.value).replace("method_options=", "") == str(error.value).replace("method_options=", "")
