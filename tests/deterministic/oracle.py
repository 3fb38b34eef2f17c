"""What a request gives alone: by arithmetic, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from kvllm import SamplingParams
from kvllm.beam_search import BeamSearch
from kvllm.core.sequence import fork_seed
from kvllm.outputs import Logprob
from kvllm.sampling_params import BeamSearchParams
from tests.deterministic.exact_model import END, MASK, Text, factor, likeliest, next_token


def alone(
    prompt: list[int],
    sampling: SamplingParams,
    index: int,
    windows: Sequence[int | None],
    max_model_len: int,
    adapter: str = "",
) -> tuple[list[int], str]:
    """Tokens and finish reason of completion `index` of a request with all KV pairs, without a stop string."""
    text = Text(prompt, adapter)
    seed = fork_seed(sampling.seed or 0, index)
    longest = min(max_model_len, len(prompt) + (sampling.max_tokens or max_model_len))
    while True:
        text.extend([_following(text, windows, sampling, seed)])
        output = text.tokens[len(prompt) :]
        if reason := ending(output, sampling, longest - len(prompt)):
            return output, reason


def beams_alone(
    prompt: list[int], params: BeamSearchParams, windows: Sequence[int | None], max_model_len: int, adapter: str = ""
) -> list[list[int]]:
    """Tokens of the texts that a search finds with all KV pairs, the best one first."""
    search = BeamSearch(prompt, params, frozenset((END,)), min(params.max_tokens, max_model_len - len(prompt)))
    while not search.is_done:
        sampling = search.sampling_params()
        firsts = [_following(Text(tokens, adapter), windows, sampling, 0) for tokens in search.prompts()]
        found = [likeliest(first, sampling.logprobs or 0) for first in firsts]
        search.advance([{token: Logprob(logprob) for token, logprob in each} for each in found])
    return [list(found.token_ids) for found in search.completions(None)]


def _following(text: Text, windows: Sequence[int | None], sampling: SamplingParams, seed: int) -> int:
    length = len(text.tokens)
    attended = 0
    for part, window in enumerate(windows):
        first = 0 if window is None else max(0, length - window)
        attended += factor(part) * (text.sums[length] - text.sums[first])
    return next_token(attended & MASK, length, text.tokens[-1], sampling, seed)


def ending(output: list[int], sampling: SamplingParams, most: int) -> str | None:
    """Why the last token of an output ends it, stop strings aside."""
    if len(output) >= sampling.min_tokens:
        if output[-1] in (sampling.stop_token_ids or ()):
            return "stop"
        if output[-1] == END and not sampling.ignore_eos:
            return "stop"
    return "length" if len(output) >= most else None
