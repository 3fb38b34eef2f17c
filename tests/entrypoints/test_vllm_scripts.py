"""What scripts for vLLM give to LLM and to its calls is obeyed with vLLM's meaning, or refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvllm
from kvllm import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    CheckpointError,
    CompressionConfig,
    ConfigError,
    EngineArgs,
    PoolingParams,
    RequestError,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from kvllm.engine_args import REFUSED
from kvllm.lora.request import LoRARequest
from kvllm.models.config import load_model_config
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.tokenizers import byte_level

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<A>{% endif %}"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with random weights, and a tokenizer with a chat template."""
    path = tmp_path_factory.mktemp("vllm")
    tokenizer = byte_level("bos").hf
    make_checkpoint(path, "qwen3", head_dim=16, vocab_size=len(tokenizer), num_hidden_layers=1)
    tokenizer.save_pretrained(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    write_generation_config(path, temperature=0.0, top_k=7, max_new_tokens=5, repetition_penalty=1.5)
    return path


def write_generation_config(path: Path, **keys: Any) -> None:
    (path / "generation_config.json").write_text(json.dumps(keys))


def make_llm(path: Path, **options: Any) -> LLM:
    return LLM(path, **{"block_size": 4, "num_gpu_blocks_override": 64, "max_model_len": 64, **options})


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return make_llm(path)


def token_ids(outputs: list[kvllm.RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_the_pages_have_every_option() -> None:
    page = "".join((Path(__file__).parents[2] / "docs" / name).read_text() for name in ("vllm.md", "options.md"))
    names = [*REFUSED, *(field.name for field in fields(EngineArgs))]
    for kind in (SamplingParams, BeamSearchParams, StructuredOutputsParams, PoolingParams):
        names += [*kind.REFUSED, *kind.__struct_fields__]
    assert [name for name in names if f"`{name}`" not in page] == []


# Defaults of sampling


def test_without_sampling_params_the_checkpoint_decides(llm: LLM) -> None:
    expected = SamplingParams(temperature=0, top_k=7, max_tokens=5, repetition_penalty=1.5)
    assert llm.get_default_sampling_params() == expected
    of_default = token_ids(llm.generate(["AB"], use_tqdm=False))
    assert of_default == token_ids(llm.generate(["AB"], expected, use_tqdm=False))
    messages = [{"role": "user", "content": "AB"}]
    assert token_ids(llm.chat(messages, use_tqdm=False)) == token_ids(llm.chat(messages, expected, use_tqdm=False))


def test_generation_config_may_be_vllm_s_or_another_directory(path: Path, tmp_path: Path) -> None:
    assert make_llm(path, generation_config="vllm").get_default_sampling_params() == SamplingParams()
    write_generation_config(tmp_path, temperature=0.25, eos_token_id=[7])
    given = make_llm(path, generation_config=str(tmp_path))
    assert given.get_default_sampling_params() == SamplingParams(temperature=0.25)
    assert 7 in given.model_config.eos_token_ids
    with pytest.raises(ConfigError, match=r"generation_config='nowhere' .* does not exist"):
        make_llm(path, generation_config="nowhere")
    write_generation_config(tmp_path, temperature=-1)
    with pytest.raises(CheckpointError, match=r"generation_config.json: temperature=-1"):
        make_llm(path, generation_config=str(tmp_path))


# Options of LLM


def test_options_that_ask_for_nothing_are_taken(path: Path, llm: LLM) -> None:
    neutral = {name: values[0] for name, (values, _) in REFUSED.items() if values}
    same = make_llm(path, **neutral, revision="main", seed=None, max_num_seqs=None, quantization=None, swap_space=0)
    assert token_ids(same.generate("AB", GREEDY, use_tqdm=False)) == token_ids(
        llm.generate("AB", GREEDY, use_tqdm=False)
    )


@pytest.mark.parametrize("option", REFUSED)
def test_options_that_cannot_be_obeyed_are_refused_with_the_reason(option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option}=.* is not allowed: .{{20,}}"):
        LLM(**{option: "something else"})


def test_an_unknown_option_has_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="no option 'max_modellen'; did you mean max_model_len"):
        LLM(max_modellen=3)
    with pytest.raises(ConfigError, match="no option 'foo': it has model, tokenizer"):
        EngineArgs(foo=1)
    with pytest.raises(ConfigError, match="only the model is given without a name"):
        LLM("a", "b")


def test_options_are_numbers_of_numpy_and_torch_too(path: Path) -> None:
    args = EngineArgs(path, max_model_len=np.int64(32), max_num_seqs=torch.tensor(3), watermark=np.float32(0.5))
    assert (args.max_model_len, args.max_num_seqs, args.watermark) == (32, 3, 0.5)
    assert type(args.max_num_seqs) is int


def test_engine_args_make_an_llm(path: Path) -> None:
    args = EngineArgs(path, block_size=4, num_gpu_blocks_override=64, max_model_len=64)
    assert LLM.from_engine_args(args).config.block_size == 4
    assert {field.name for field in fields(args)} >= {"tokenizer", "max_logprobs", "hf_overrides"}


def test_the_tokenizer_may_be_another_directory(path: Path, tmp_path: Path, llm: LLM) -> None:
    make_checkpoint(tmp_path, "qwen3", head_dim=16, vocab_size=load_model_config(path).vocab_size, num_hidden_layers=1)
    output = make_llm(tmp_path, tokenizer=path).generate("AB", GREEDY, use_tqdm=False)[0]
    assert output.prompt_token_ids == llm.get_tokenizer().encode("AB") and output.outputs[0].text
    structured = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["AB"]), temperature=0)
    assert make_llm(tmp_path, tokenizer=str(path)).generate("A", structured, use_tqdm=False)[0].outputs[0].text == "AB"
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        make_llm(path, tokenizer=str(tmp_path))


def test_hf_overrides_are_values_of_config_json(path: Path) -> None:
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert make_llm(path, hf_overrides=theta | {"max_position_embeddings": 70}).model_config.rope.theta == 7.0
    with pytest.raises(ConfigError, match="max_position_embeddings=40"):
        make_llm(path, hf_overrides={"max_position_embeddings": 40})
    with pytest.raises(ConfigError, match="hf_overrides=3"):
        make_llm(path, hf_overrides=3)


def test_swap_space_is_host_memory_of_each_rank(path: Path) -> None:
    assert make_llm(path, swap_space=0.001).config.num_host_blocks > 0
    assert EngineArgs(path, swap_space=2, tensor_parallel_size=2).host_size == 4
    with pytest.raises(ConfigError, match=r"swap_space=1 is not allowed: .* not both"):
        make_llm(path, swap_space=1, kv_offloading_size=1)


def test_without_chunked_prefill_a_prompt_is_computed_in_one_step(path: Path, llm: LLM) -> None:
    whole = make_llm(path, enable_chunked_prefill=False, max_num_seqs=8, max_num_batched_tokens=8)
    assert whole.config.max_num_batched_tokens == 64
    prompts = [[1 + i] * 40 for i in range(4)]
    engine, chunks = whole.llm_engine, []
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    launch = engine.executor.launch  # type: ignore[union-attr]
    engine.executor.launch = lambda plan: (chunks.extend(plan.chunks), launch(plan))[1]  # type: ignore[union-attr]
    while engine.has_unfinished_requests():
        engine.step()
    assert [chunk.num_tokens for chunk in chunks] == [40] * 4
    assert token_ids(whole.generate(prompts, GREEDY, use_tqdm=False)) == token_ids(
        llm.generate(prompts, GREEDY, use_tqdm=False)
    )


# Log probabilities


def test_max_logprobs_bounds_what_a_request_may_ask_for(path: Path, llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"logprobs=21 is not allowed: .* max_logprobs=20"):
        llm.generate("AB", SamplingParams(logprobs=21), use_tqdm=False)
    with pytest.raises(RequestError, match=r"prompt_logprobs=-1, of all \d+ tokens is not allowed"):
        llm.generate("AB", SamplingParams(prompt_logprobs=-1), use_tqdm=False)
    every = make_llm(path, max_logprobs=-1)
    params = SamplingParams(logprobs=-1, prompt_logprobs=-1, max_tokens=2, temperature=0)
    output = every.generate("AB", params, use_tqdm=False)[0]
    size = every.model_config.vocab_size
    assert [len(each) for each in output.outputs[0].logprobs or []] == [size] * 2
    assert [each and len(each) for each in output.prompt_logprobs or []] == [None, size, size]
    probabilities = torch.tensor([each.logprob for each in (output.outputs[0].logprobs or [])[0].values()]).exp()
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-4)


# Options of requests


def test_numbers_of_numpy_and_torch_are_sampling_options() -> None:
    given = SamplingParams(
        temperature=np.float32(0.5),
        top_p=torch.tensor(0.25),
        max_tokens=np.int64(4),
        n=torch.tensor(2),
        stop_token_ids=np.array([1, 2]),
        logit_bias={np.int64(3): np.float64(2)},
        ignore_eos=np.bool_(True),
    )
    plain = {"stop_token_ids": [1, 2], "logit_bias": {3: 2.0}, "ignore_eos": True}
    assert given == SamplingParams(temperature=0.5, top_p=0.25, max_tokens=4, n=2, **plain)
    assert type(given.max_tokens) is int
    with pytest.raises(ConfigError, match="max_tokens=array"):
        SamplingParams(max_tokens=np.array([1, 2]))


@pytest.mark.parametrize("name", SamplingParams.REFUSED)
def test_sampling_options_that_cannot_be_obeyed_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=.* is not allowed: .{{10,}}"):
        SamplingParams(**{name: "something else"})
    neutral, _ = SamplingParams.REFUSED[name]
    assert all(SamplingParams(**{name: value}) == SamplingParams() for value in (None, *neutral))


def test_structured_outputs_have_vllm_s_name_and_options() -> None:
    for name, (neutral, _) in StructuredOutputsParams.REFUSED.items():
        with pytest.raises(ConfigError, match=f"^{name}=.* is not allowed: .{{10,}}"):
            StructuredOutputsParams(regex="a", **{name: "something else"})
        for value in (None, *neutral):
            assert StructuredOutputsParams(regex="a", **{name: value}) == StructuredOutputsParams(regex="a")
    with pytest.raises(ConfigError, match="no option 'regx'; did you mean regex"):
        StructuredOutputsParams(regx="a")


def test_detokenize_false_makes_no_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=1)
    output, whole = llm.generate("AB", params, use_tqdm=False)[0], llm.generate("AB", GREEDY, use_tqdm=False)[0]
    assert output.outputs[0].text == "" and whole.outputs[0].text
    assert output.outputs[0].token_ids == whole.outputs[0].token_ids
    assert {each.decoded_token for of in output.outputs[0].logprobs or [] for each in of.values()} == {None}
    with pytest.raises(ConfigError, match="only with detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


def test_truncate_prompt_tokens_keeps_the_last_ones(llm: LLM) -> None:
    prompt = list(range(3, 90))
    for most, kept in ((5, 5), (-1, 64 - 6), (1000, None)):
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, truncate_prompt_tokens=most)
        if kept is None:
            with pytest.raises(RequestError, match="the prompt has 87 tokens"):
                llm.generate([prompt], params, use_tqdm=False)[0]
                raise llm.generate([prompt], params, use_tqdm=False)[0].error or AssertionError
        else:
            assert llm.generate([prompt], params, use_tqdm=False)[0].prompt_token_ids == prompt[-kept:]


def test_output_kinds_of_a_step(llm: LLM) -> None:
    engine = llm.llm_engine
    text = llm.generate("AB", GREEDY, use_tqdm=False)[0].outputs[0].text
    for kind in RequestOutputKind:
        engine.add_request("a", "AB", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_kind=kind))
        texts, tokens, finished = [], [], []
        while engine.has_unfinished_requests():
            for output in engine.step():
                texts.append(output.outputs[0].text)
                tokens.append(len(output.outputs[0].token_ids))
                finished.append(output.finished)
        expected = {
            RequestOutputKind.CUMULATIVE: ([1, 2, 3, 4, 5, 6], texts[-1:]),
            RequestOutputKind.DELTA: ([1] * 6, texts),
            RequestOutputKind.FINAL_ONLY: ([6], texts),
        }[kind]
        assert tokens == expected[0] and "".join(expected[1]) == text
        assert finished == [False] * (len(tokens) - 1) + [True]


async def items_of(llm: AsyncLLM, kind: RequestOutputKind | None) -> list[tuple[str, list[int]]]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, n=2, output_kind=kind)
    found = []
    async for output in llm.generate("AB", params, f"kind-{kind}"):
        found.append([(each.index, each.text, len(each.token_ids)) for each in output.outputs])
    return found


async def joined_items_of(llm: AsyncLLM, kind: RequestOutputKind | None) -> list[tuple[str, int]]:
    """Deltas of each completion, joined: a slow reader gets several steps in one."""
    texts, tokens = ["", ""], [0, 0]
    for item in await items_of(llm, kind):
        for index, text, count in item:
            texts[index] += text
            tokens[index] += count
    return list(zip(texts, tokens, strict=True))


def test_output_kinds_of_async_llm(path: Path) -> None:
    import asyncio

    llm = AsyncLLM.from_engine_args(EngineArgs(path, block_size=4, num_gpu_blocks_override=64, max_model_len=64))

    async def run() -> None:
        whole = await joined_items_of(llm, None)
        assert [tokens for _, tokens in whole] == [6, 6]
        assert await joined_items_of(llm, RequestOutputKind.DELTA) == whole
        for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY):
            items = await items_of(llm, kind)
            assert [(text, tokens) for _, text, tokens in sorted(items[-1])] == whole
            assert len(items) == 1 or kind is RequestOutputKind.CUMULATIVE
        with pytest.raises(ConfigError, match="sampling_params=None"):
            await anext(llm.generate("AB", None, "none"))  # type: ignore[arg-type]

    try:
        asyncio.run(run())
    finally:
        llm.shutdown()


def test_max_tokens_none_is_what_fits_into_the_pool(path: Path) -> None:
    small = make_llm(path, num_gpu_blocks_override=6, max_model_len=None)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    output = small.generate([[5, 6, 7]], params, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 6 * 4 - 3 + 1  # the last one is never stored
    assert output.outputs[0].finish_reason == "length"
    many = small.generate([[5, 6, 7]] * 3, params, use_tqdm=False)
    assert token_ids(many) == token_ids([output] * 3)
    with pytest.raises(RequestError, match="the pool has 6"):
        small.generate([[5] * 30], params, use_tqdm=False)
        raise small.generate([[5] * 30], params, use_tqdm=False)[0].error or AssertionError
    compression = CompressionConfig(
        method="streaming", policy="threshold", threshold_tokens=16, budget_tokens=8, buffer=2
    )
    longer = make_llm(path, num_gpu_blocks_override=6, max_model_len=None, compression=compression)
    output = longer.generate([[5, 6, 7]], params, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == longer.config.max_model_len - 3


def test_a_pool_that_is_smaller_than_max_model_len_is_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_llm(path, num_gpu_blocks_override=1, max_model_len=None)
    assert "the KV pool has 1 blocks of 4 tokens" in caplog.text and "max_model_len=512 needs 128" in caplog.text


# Prompts


def test_prompts_are_vllm_s_dicts(llm: LLM) -> None:
    encoded = llm.get_tokenizer().encode("AB")
    prompts = [TextPrompt(prompt="AB"), TokensPrompt(prompt_token_ids=encoded), {"prompt": "AB", "cache_salt": "x"}]
    prompts.append({"prompt": "AB", "multi_modal_data": None, "mm_processor_kwargs": {}})
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert len({str(each) for each in token_ids(outputs)}) == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({1: 2}, "a prompt given as a dict needs 'prompt' or 'prompt_token_ids', 1 is neither"),
        ({"promt": "A"}, "'promt' is neither; did you mean prompt"),
        ({"prompt": "A", "multi_modal_data": {"image": 3}}, "'multi_modal_data' is not supported"),
        ({"prompt_embeds": torch.zeros(2)}, "'prompt_embeds' is not supported"),
        ({"prompt": None}, r"this one has \['prompt'\]"),
    ],
    ids=str,
)
def test_a_dict_that_is_no_prompt_is_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert llm.generate(["A", prompt], GREEDY, use_tqdm=False)[1].error is not None


@pytest.mark.parametrize("params", [None, {}, 3, SamplingParams], ids=str)
def test_add_request_refuses_what_are_no_sampling_params(llm: LLM, params: Any) -> None:
    with pytest.raises(ConfigError, match=r"sampling_params=.* is not allowed: they are of type SamplingParams"):
        llm.llm_engine.add_request("a", "AB", params)
    assert not llm.llm_engine.has_unfinished_requests()


def test_large_numbers_are_refused_before_anything_runs() -> None:
    for field in ("period", "window_blocks"):
        with pytest.raises(ConfigError, match=f"{field}={10**30} is not allowed: at most"):
            CompressionConfig(**{field: 10**30})
    methods = {"expected_attention": "future", "chunkkv": "chunk", "streaming": "sinks", "snapkv": "query_window"}
    for method, option in (*methods.items(), ("kara_no_bi", "chunk_budget"), ("kara_no_bi", "max_chunk")):
        policy = {"policy": "threshold", "threshold_tokens": 64, "budget_tokens": 48}
        with pytest.raises(ConfigError, match=f"{option}.* is not allowed"):
            CompressionConfig(method=method, method_options={option: 10**30}, **policy)


# Calls


def test_priorities_decide_who_runs_first(path: Path) -> None:
    alone = make_llm(path, max_num_seqs=1)
    order = []
    engine = alone.llm_engine
    process = engine.outputs.process

    def noting(sampled, *others):
        order.extend(seq.request_id for seq, _ in sampled)
        return process(sampled, *others)

    engine.outputs.process = noting
    alone.generate(["A", "B", "C"], GREEDY, use_tqdm=False, priority=[5, 1, 3])
    assert [int(each) for each in dict.fromkeys(order)] == [1, 2, 0]
    alone.generate(["A", "B"], GREEDY, use_tqdm=False, priority=2)
    with pytest.raises(RequestError, match="1 priority for 2 prompts"):
        alone.generate(["A", "B"], GREEDY, use_tqdm=False, priority=[1])


def test_adapters_are_refused_where_none_are_taken(llm: LLM) -> None:
    request = LoRARequest("x", 1, "path")
    with pytest.raises(RequestError, match="the engine takes none: set enable_lora"):
        llm.generate([5], GREEDY, lora_request=request)
    with pytest.raises(RequestError, match="is not allowed: a LoRARequest, or None"):
        llm.generate([5], GREEDY, lora_request=object())  # type: ignore[arg-type]


def test_reset_prefix_cache_forgets(llm: LLM) -> None:
    prompt = [9] * 20
    llm.generate([prompt], GREEDY, use_tqdm=False)
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 16
    assert llm.reset_prefix_cache() is True
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_metrics_have_vllm_s_names(path: Path) -> None:
    fresh = make_llm(path)
    fresh.generate([[1, 2, 3]] * 2, GREEDY, use_tqdm=False)
    found: dict[str, float] = {metric.name: metric.value for metric in fresh.get_metrics()}  # type: ignore[attr-defined]
    assert found["vllm:prompt_tokens"] == 6 and found["vllm:generation_tokens"] == 12
    assert found["vllm:num_requests_running"] == found["vllm:kv_cache_usage_perc"] == 0


# Chats


def rendered(llm: LLM, messages: Any, call: Callable[..., Any] | None = None, **options: Any) -> str:
    return (call or llm.chat)(messages, GREEDY, use_tqdm=False, **options)[0].prompt or ""


def test_a_last_message_may_be_continued(llm: LLM) -> None:
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    assert rendered(llm, messages) == "<user>A<assistant>B<A>"
    assert rendered(llm, messages, continue_final_message=True) == "<user>A<assistant>B"
    assert rendered(llm, messages, add_generation_prompt=False) == "<user>A<assistant>B"
    with pytest.raises(RequestError, match="leave out add_generation_prompt"):
        rendered(llm, messages, continue_final_message=True, add_generation_prompt=True)


def test_a_chat_has_its_own_template_and_tools(path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    template = "{{ tools | tojson }}{{ messages[0].content }}{{ mood }}"
    options = {"chat_template": template, "tools": tools, "chat_template_kwargs": {"mood": "!"}}
    long = make_llm(path, max_model_len=512, num_gpu_blocks_override=128)
    assert rendered(long, [{"role": "user", "content": "A"}], **options) == json.dumps(tools) + "A!"


def test_messages_reach_the_template_as_in_the_server(path: Path) -> None:
    """Parts are text, arguments of calls are objects, and what is no text is refused by name."""
    long = make_llm(path, max_model_len=512, num_gpu_blocks_override=128)
    template = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}"
        "{% endfor %};{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [call]}]
    assert rendered(long, messages, chat_template=template) == "A\nB;a=1;"
    assert isinstance(call["function"]["arguments"], str)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(RequestError, match=r"messages\[0\] has a part of type 'image_url'"):
        rendered(long, [image], chat_template=template)
    with pytest.raises(RequestError, match="chat_template_kwargs may not have 'messages'"):
        rendered(long, messages, chat_template_kwargs={"messages": []})
    with pytest.raises(RequestError, match="Object missing required field `function`"):
        rendered(long, messages, tools=[{"type": "function"}])


def test_the_tokenizer_is_that_of_transformers(llm: LLM, path: Path) -> None:
    from transformers import AutoTokenizer

    assert llm.get_tokenizer().encode("ABC") == AutoTokenizer.from_pretrained(path).encode("ABC")
    with pytest.raises(RequestError, match="no tokenizer"):
        make_llm_without_tokenizer(path).get_tokenizer()


def make_llm_without_tokenizer(path: Path) -> LLM:
    bare = path / "bare"
    bare.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(path / name, bare)
    return make_llm(bare)
