"""Text in, text out: the embedded model, stop conditions, streaming and chat."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from benchmarks.reasoner.problems import grade
from benchmarks.reasoner.tasks import make_problem
from benchmarks.reasoner.tokenizer import encode
from kvllm import LLM, RequestError, SamplingParams
from tests.helpers.checkpoints import make_checkpoint, make_parrot
from tests.helpers.compressions import paper_compression
from tests.helpers.tokenizers import byte_level, sentencepiece_like


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(block_size=16, num_gpu_blocks_override=300, max_model_len=2048)


@pytest.fixture(scope="module")
def problems():
    rng = random.Random(5)
    return [make_problem(rng, size) for size in (3, 5, 8, 12)]


def test_the_embedded_model_solves_its_problems(llm: LLM, problems) -> None:
    params = SamplingParams(temperature=0, max_tokens=1000)
    outputs = llm.generate([problem.prompt for problem in problems], params, use_tqdm=False)
    for problem, output in zip(problems, outputs, strict=True):
        assert output.prompt == problem.prompt
        assert grade(problem, output.outputs[0].text) == (True, True)
        assert output.outputs[0].finish_reason == "stop" and output.outputs[0].stop_reason is None
        assert output.outputs[0].token_ids[-1] in llm.model_config.eos_token_ids


def test_the_embedded_model_solves_problems_while_it_is_compressed() -> None:
    rng = random.Random(5)
    problems = [make_problem(rng, 20) for _ in range(4)]
    compression = paper_compression(method="mean_attention", period=16, window_blocks=8, retain_blocks=4, buffer=32)
    llm = LLM(block_size=16, num_gpu_blocks_override=500, max_model_len=2048, compression=compression)
    params = SamplingParams(temperature=0, max_tokens=1000)
    outputs = llm.generate([problem.prompt for problem in problems], params, use_tqdm=False)
    right = sum(grade(p, o.outputs[0].text)[0] for p, o in zip(problems, outputs, strict=True))
    assert llm.stats().windows_compressed >= 12
    assert right >= 3  # of many more, nearly all: the wrong entries kept give none


def test_stop_strings_and_token_ids(llm: LLM, problems) -> None:
    problem = problems[0]
    line = problem.working.splitlines()[2]

    def run(**options):
        params = SamplingParams(temperature=0, max_tokens=300, **options)
        return llm.generate(problem.prompt, params, use_tqdm=False)[0].outputs[0]

    before = problem.working[: problem.working.index(line)]
    stopped = run(stop=["never", line])
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (before, "stop", line)
    assert run(stop=line, include_stop_str_in_output=True).text == before + line
    newline = llm.tokenizer.encode("\n")[0]
    stopped = run(stop_token_ids=[newline])
    assert (stopped.text, stopped.stop_reason) == (problem.working.splitlines()[0], newline)
    assert stopped.token_ids[-1] == newline
    later = run(stop_token_ids=[newline], min_tokens=15)
    assert len(later.token_ids) >= 15
    assert run(ignore_eos=True).finish_reason == "length"


def test_text_grows_while_stepping(llm: LLM, problems) -> None:
    engine = llm.llm_engine
    output = engine.add_request("stream", problems[0].prompt, SamplingParams(temperature=0, max_tokens=20))
    seen = []
    while engine.has_unfinished_requests():
        engine.step()
        seen.append(output.outputs[0].text)
    assert seen[-1] == llm.tokenizer.decode(encode(problems[0].working)[:20])
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))
    assert len(set(seen)) == 20


def test_a_prompt_the_tokenizer_cannot_read(llm: LLM) -> None:
    with pytest.raises(RequestError, match="tokenizer cannot encode the prompt"):
        llm.generate("Ready there", SamplingParams(max_tokens=2), use_tqdm=False)


def test_the_progress_bar(llm: LLM, problems, capsys: pytest.CaptureFixture) -> None:
    llm.generate([problem.prompt for problem in problems], SamplingParams(temperature=0, max_tokens=30))
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown and "4/4" in shown
    for part in ("input", "output", "tok/s", "running", "KV pool"):
        assert part in shown


def test_chat(tmp_path: Path) -> None:
    tokenizer = byte_level("chat").hf
    make_checkpoint(tmp_path, "qwen3", vocab_size=len(tokenizer), num_hidden_layers=1, head_dim=8)
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(tmp_path, block_size=16, num_gpu_blocks_override=50)
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = llm.chat(messages, params, use_tqdm=False)
    text = llm.tokenizer.decode(output.prompt_token_ids)
    assert text == "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert len(output.outputs[0].token_ids) == 4
    quick, usual = llm.chat(
        [messages, messages], params, use_tqdm=False, chat_template_kwargs={"enable_thinking": False}
    )
    assert quick.prompt_token_ids == usual.prompt_token_ids
    assert "<think>\n\n</think>" in llm.tokenizer.decode(quick.prompt_token_ids)
    with pytest.raises(RequestError, match="role"):
        llm.chat([{"content": "no role"}])


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model of one story, whose tokenizer is of the Llama 2 kind."""
    path = tmp_path_factory.mktemp("stories")
    make_parrot(path, sentencepiece_like().hf, ["<s>", "▁Once", "▁upon", "▁a", "▁the", "字", "b", "</s>"])
    return LLM(path, block_size=16, num_gpu_blocks_override=50)


def test_the_prompt_and_the_text_are_one_text(stories: LLM) -> None:
    """A Llama-style decoder drops the first space of a text, and the completion is not its beginning."""
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = ["Once", "Once upon a", {"prompt_token_ids": stories.tokenizer.encode("Once")}]
    outputs = stories.generate(prompts, params, use_tqdm=False)
    assert outputs[0].outputs[0].text == outputs[2].outputs[0].text
    for output in outputs:
        whole = stories.tokenizer.decode(output.prompt_token_ids + output.outputs[0].token_ids, True)
        assert stories.tokenizer.decode(output.prompt_token_ids, True) + output.outputs[0].text == whole
        assert output.outputs[0].text.startswith(" ")
    (beginning,) = stories.generate([[stories.tokenizer.hf.bos_token_id]], params, use_tqdm=False)
    assert beginning.outputs[0].text == "Once upon a the字b"


def test_a_stop_string_that_begins_with_the_first_tokens_space(stories: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, stop=[" upon"])
    (stopped,) = stories.generate(["Once"], params, use_tqdm=False)
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("", " upon")
    engine = stories.llm_engine
    output = engine.add_request("stream", "Once", SamplingParams(temperature=0, max_tokens=12))
    engine.step()
    assert output.outputs[0].text == " upon"
    engine.abort("stream")


def test_the_decoded_tokens_of_logprobs_have_their_leading_spaces(stories: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    completion = stories.generate("Once", params, use_tqdm=False)[0].outputs[0]
    tokens = zip(completion.token_ids, completion.logprobs, strict=True)
    decoded = [found[token_id].decoded_token for token_id, found in tokens]
    assert decoded == [" upon", " a", " the", "字"]
    assert "".join(decoded) == completion.text
