"""Ways to round KV pairs, and the script that compares them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.common import kv_schemes
from benchmarks.common.kv_schemes import Scheme, in_groups, of_format, schemes_of, with_outliers
from benchmarks.quality.kv_schemes import run_schemes
from kvllm import LLM, SamplingParams
from kvllm.comparison.kv_caches import check_kv_cache, kv_cache_options
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.errors import ConfigError
from kvllm.kvcache.formats import INT4, INT4_HADAMARD, INT8
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import random_token_ids


def outlying(channels: int = 64) -> torch.Tensor:
    """Vectors of which one channel exceeds the others by far."""
    vectors = torch.randn(1, 2, 50, channels, generator=torch.Generator().manual_seed(0))
    vectors[..., 5] *= 30
    return vectors


def error(rounding: kv_schemes.Rounding, vectors: torch.Tensor) -> float:
    return float((rounding(vectors) - vectors).square().mean())


def test_roundings_are_those_of_their_formulas() -> None:
    vectors = outlying()
    whole = of_format(INT4).rounding(vectors)
    assert whole.unique().numel() <= 16 * 100 and error(of_format(INT4).rounding, vectors) > 0.1
    groups = in_groups(16).rounding(vectors)
    for begin in range(0, 64, 16):
        piece = slice(begin, begin + 16)
        assert torch.equal(groups[..., piece], of_format(INT4).rounding(vectors[..., piece]))
    few = with_outliers(1).rounding(vectors)
    others = [channel for channel in range(64) if channel != 5]
    assert (few[..., others] - vectors[..., others]).abs().max() <= vectors[..., others].abs().max() / 15 * 1.02
    assert torch.equal(few[..., 5], of_format(INT8).rounding(vectors[..., 5:6])[..., 0])


def test_outliers_harm_less_in_groups_rotated_and_apart() -> None:
    vectors = outlying()
    whole = error(of_format(INT4).rounding, vectors)
    for better in (in_groups(16), of_format(INT4_HADAMARD), with_outliers(2)):
        assert error(better.rounding, vectors) < whole / 2


def test_shares_are_those_of_the_bytes() -> None:
    """Of a key and a value of 128 channels: 512 bytes in bfloat16."""
    shares = {name: scheme.share(128) * 512 for name, scheme in schemes_of(128).items()}
    assert shares["int8"] == 264 and shares["int4"] == 136 and shares["int8_int4"] == 200
    assert shares["int6_int4"] == 168
    assert shares["int4 in groups of 32"] == 2 * 80 and shares["int4, 4 channels of keys in int8"] == 136 + 2 + 4
    assert "int4, keys rotated" not in schemes_of(96) and "int4 in groups of 32" in schemes_of(96)


def read(path: Path, token_ids: list[int], scheme: Scheme | None) -> torch.Tensor:
    transformers.AttentionInterface.register("rounded", kv_schemes.attend)
    transformers.AttentionMaskInterface.register("rounded", transformers.masking_utils.eager_mask)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="rounded")
    with torch.inference_mode():
        return model.eval()(torch.tensor([token_ids]), use_cache=False, scheme=scheme).logits[0]


@pytest.mark.parametrize("residual", [0, 6])
def test_predictions_are_those_of_an_engine(tmp_path: Path, residual: int) -> None:
    """Of one that rounds its KV pairs so, and holds the last ones as they are."""
    make_checkpoint(tmp_path, "qwen3", head_dim=32)
    (token_ids,) = random_token_ids(40)
    int4 = of_format(INT4)
    llm = LLM(tmp_path, kv_cache_dtype="int4", kv_residual_tokens=residual, max_model_len=64)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    following = list(enumerate(token_ids))[1:]
    found = torch.tensor([output.prompt_logprobs[i][token_id].logprob for i, token_id in following])

    def difference(scheme: Scheme | None) -> float:
        logprobs = read(tmp_path, token_ids, scheme).log_softmax(dim=-1)
        return float((torch.stack([logprobs[i - 1, token_id] for i, token_id in following]) - found).abs().mean())

    others = [difference(other) for other in (None, Scheme(int4, int4, 6 - residual), Scheme(int4, of_format(INT8)))]
    assert difference(Scheme(int4, int4, residual)) < min(others) / 3


def test_the_script_tells_schemes_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", DEFAULT_MODEL, "--task", "program", "--length", "400", "--texts", "2"]
    run_schemes([*map(str, arguments), "--output", str(tmp_path)])
    written = json.loads((tmp_path / "kv_schemes.json").read_text())["schemes"]
    assert 0 <= written["int8"]["divergence"] < written["int4"]["divergence"]
    assert written["int4"]["positions"] > 10 and "int4, residual of 64" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--texts"):
        run_schemes(["--texts", "0"])


def test_names_of_caches() -> None:
    assert kv_cache_options("int4+32") == ("int4", 32) and kv_cache_options("auto") == ("auto", 0)
    for name in ("int5", "int4+", "int4+x", "+3"):
        with pytest.raises(ConfigError, match="--kv-cache-dtype"):
            check_kv_cache("--kv-cache-dtype", name)
