"""What a request gives alone: by arithmetic, without an engine."""

from __future__ import annotations

from kvllm import SamplingParams
from kvllm.beam_search import BeamSearch
from kvllm.config import EngineConfig
from kvllm.core.sequence import fork_seed
from kvllm.outputs import Logprob
from kvllm.sampling_params import BeamSearchParams
from kvllm.structured.compile import Grammars
from tests.deterministic.exact_model import (
    END,
    MASK,
    RECURRENT,
    Text,
    factor,
    likeliest,
    listed,
    next_token,
    prompt_logprob,
)


class Alone:
    """A model that computes one request, with all KV pairs. config: of the engine. adapter: of the request."""

    def __init__(self, config: EngineConfig, grammars: Grammars | None, adapter: str = "") -> None:
        self.windows = [group.window for group in config.kv_groups for _ in group.parts]
        self.config = config
        self.grammars = grammars
        self.adapter = adapter

    def complete(self, prompt: list[int], sampling: SamplingParams, index: int) -> tuple[list[int], str]:
        """Tokens and finish reason of completion `index` of a request without a stop string."""
        text, most = Text(prompt, self.adapter), self.config.max_model_len
        seed = fork_seed(sampling.seed or 0, index)
        longest = min(most, len(prompt) + (most if sampling.max_tokens is None else sampling.max_tokens))
        rule = sampling.structured_outputs
        matcher = self.grammars.matcher(rule) if rule is not None and self.grammars else None
        output: list[int] = []
        while not (reason := ending(output, sampling, longest - len(prompt))):
            allowed = matcher and listed(matcher.allowed(output))
            text.extend([self._following(text, sampling, seed, allowed)])
            output = text.tokens[len(prompt) :]
        return output, reason

    def prompt_logprobs(self, prompt: list[int]) -> list[float | None]:
        """The log probability of each token of a prompt; the first one has none."""
        text = Text(prompt, self.adapter)
        known = (prompt_logprob(self._pairs(text, i), i, prompt[i]) for i in range(1, len(prompt)))
        return [None, *known]

    def search(self, prompt: list[int], params: BeamSearchParams) -> list[list[int]]:
        """Tokens of the texts that a beam search finds, the best one first."""
        most = min(params.max_tokens, self.config.max_model_len - len(prompt))
        search = BeamSearch(prompt, params, frozenset((END,)), most)
        while not search.is_done:
            sampling = search.sampling_params()
            firsts = [self._following(Text(tokens, self.adapter), sampling, 0) for tokens in search.prompts()]
            found = [likeliest(first, sampling.logprobs or 0) for first in firsts]
            search.advance([{token: Logprob(logprob) for token, logprob in each} for each in found])
        return [list(found.token_ids) for found in search.completions(None)]

    def _following(self, text: Text, sampling: SamplingParams, seed: int, allowed: list[int] | None = None) -> int:
        length = len(text.tokens)
        state = RECURRENT * text.digests[-1] * self.config.has_recurrent_layers
        attended = self._pairs(text, length) + state & MASK
        return next_token(attended, length, text.tokens[-1], sampling, seed, allowed)

    def _pairs(self, text: Text, length: int) -> int:
        """The sum over the pairs that the token after `length` tokens attends."""
        attended = 0
        for part, window in enumerate(self.windows):
            first = 0 if window is None else max(0, length - window)
            attended += factor(part) * (text.sums[length] - text.sums[first])
        return attended & MASK


def ending(output: list[int], sampling: SamplingParams, most: int) -> str | None:
    """Why the last token of an output ends it, stop strings aside."""
    if output and len(output) >= sampling.min_tokens:
        if output[-1] in (sampling.stop_token_ids or ()):
            return "stop"
        if output[-1] == END and not sampling.ignore_eos:
            return "stop"
    return "length" if len(output) >= most else None
