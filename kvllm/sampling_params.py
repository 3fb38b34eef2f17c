"""Options of one request: sampling and stopping rules. Names and defaults are those of vLLM."""

from __future__ import annotations

from enum import Enum
from itertools import chain
from typing import ClassVar

from msgspec.structs import force_setattr

from kvllm.config import Options, Refused, check_types, require
from kvllm.errors import RequestError
from kvllm.structured_outputs import StructuredOutputsParams

# Below this temperature the draw is the argmax: dividing by it would only overflow.
GREEDY_TEMPERATURE = 1e-5
# Logits are float32: a factor that this type cannot hold would make NaN of what is 0 or forbidden. At this temperature
# all tokens have the same probability already.
MAX_TEMPERATURE = 1e6
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
MAX_BIAS = 100.0
MAX_BEAMS = 16
# Requests travel to the workers as MessagePack, whose integers have 64 bits.
MAX_INTEGER = 2**63 - 1


class RequestOutputKind(Enum):
    """What an engine's `step` and `AsyncLLM.generate` give of a request: all that there is so far, what is new since
    the last time, or nothing before its end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(Options, frozen=True, kw_only=True, array_like=True):
    """Sampling options of one request. Keywords only; a wrong value raises ConfigError when constructed.

    Every integer is less than 2**63.

    Attributes:
        n: completions of the prompt.
        temperature: 0 is greedy. At most 1,000,000.
        top_p: keep the most probable tokens whose probabilities reach this sum.
        top_k: keep this many of the most probable tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this probable, relative to the most probable one.
        seed: makes the request's tokens reproducible, whatever else runs beside it; None or -1 lets the engine choose.
        max_tokens: most tokens generated; None for as many as the model's length allows. 0 needs `prompt_logprobs`.
        min_tokens: the end of sequence, `stop_token_ids` and `stop` have no effect before this many tokens.
        stop: a string or strings that end the output (stored as a list).
        stop_token_ids: further token ids that end the output.
        ignore_eos: do not stop at the end-of-sequence token.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output. From
            0.000001 to 1,000,000.
        presence_penalty: subtracted once from the logit of an output token. From -2 to 2.
        frequency_penalty: subtracted from the logit of an output token for each occurrence. From -2 to 2.
        logprobs: also report this many most likely tokens at each position, and the log probability of the one sampled.
            At most the engine's `max_logprobs`; -1 for the whole vocabulary, if that allows it.
        prompt_logprobs: the same for each position of the prompt but the first. The whole prompt is computed for them:
            none of it comes from the prefix cache.
        logit_bias: added to the logits of tokens, by id. From -100 to 100.
        allowed_token_ids: only these tokens are generated.
        bad_words: words that are not generated, within others neither. Of a word of several tokens, the last one is
            kept from following the others.
        bad_words_token_ids: the same for words given as token ids.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string at the end of the text.
        detokenize: make the text. Without it, outputs have token ids alone.
        truncate_prompt_tokens: leave this many tokens of the prompt, the last ones; -1 for as many as fit.
        output_kind: see RequestOutputKind. None: `AsyncLLM.generate` gives what is new, `step` all. `LLM.generate`
            returns at the end, whatever it is.
        budget_tokens: KV pairs that compression by threshold leaves of this request's cache, instead of the engine's
            `CompressionConfig.budget_tokens`.
        compress: False keeps all KV pairs of this request, whatever the engine's `compression` is.
        retain_blocks: blocks that compression leaves of each window of this request's cache, instead of the engine's
            `CompressionConfig.retain_blocks`. As many as a window has keep all of it.
        structured_outputs: a JSON schema, regular expression, choice or grammar that the text obeys. It ends where this
            allows it.
        report_kept_pairs: tell which KV pairs layers and heads keep at each compression (`RequestMetrics.kept_pairs`).
    """

    REFUSED: ClassVar[Refused] = {
        "logits_processors": (
            ([],),
            "no code of a request runs in the engine: use logit_bias, allowed_token_ids, "
            "bad_words or structured_outputs",
        ),
        "guided_decoding": ((), "use structured_outputs=StructuredOutputsParams(...)"),
        "best_of": ((1,), "use n, or LLM.beam_search"),
        "use_beam_search": ((False,), "use LLM.beam_search"),
        "length_penalty": ((1.0,), "use LLM.beam_search"),
        "extra_args": (({},), "there are no further ones"),
        "spaces_between_special_tokens": ((True,), "text is what the tokenizer makes of the tokens"),
        "thinking_token_budget": ((), "use max_tokens"),
        "repetition_detection": (({},), "use repetition_penalty, frequency_penalty or presence_penalty"),
        "logprob_token_ids": (([],), "use logprobs"),
        "flat_logprobs": ((False,), "logprobs has a dict for each token"),
        "skip_reading_prefix_cache": ((False,), "use enable_prefix_caching=False, or reset_prefix_cache"),
    }

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind | None = None
    budget_tokens: int | None = None
    compress: bool = True
    retain_blocks: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    report_kept_pairs: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        self._normalize()
        self._check_filters()
        self._check_penalties()
        self._check_lengths()
        self._check_tokens()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def check_vocabulary(self, vocab_size: int, max_logprobs: int) -> None:
        """Raises RequestError if a vocabulary of `vocab_size` tokens does not have what is named, or as many tokens as
        are to be reported. max_logprobs: that an engine reports; -1 for all."""
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(self, field)
            if count is None:
                continue
            if count > vocab_size:
                raise RequestError(f"{field}={count} is not allowed: the vocabulary has {vocab_size} tokens")
            asked = vocab_size if count == -1 else count
            if asked > max_logprobs != -1:
                of_all = f", of all {vocab_size} tokens" if count == -1 else ""
                raise RequestError(
                    f"{field}={count}{of_all} is not allowed: the engine reports at most max_logprobs={max_logprobs}, "
                    "which is an option of LLM; -1 allows all"
                )
        named = {
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words_token_ids": chain(*(self.bad_words_token_ids or ())),
        }
        for field, token_ids in named.items():
            outside = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
            if outside is not None:
                allowed = f"the vocabulary has token ids from 0 to {vocab_size - 1}"
                raise RequestError(f"{field} with token id {outside} is not allowed: {allowed}")

    def _normalize(self) -> None:
        """One spelling of each meaning: a list for `stop` and `stop_token_ids`, 0 for no top_k, None for no seed."""
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        force_setattr(self, "stop", stop)
        force_setattr(self, "stop_token_ids", list(self.stop_token_ids or []))
        force_setattr(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        force_setattr(self, "seed", None if self.seed == -1 else self.seed)

    def _check_filters(self) -> None:
        hottest = f"between 0 and {MAX_TEMPERATURE:,.0f}"
        require(0 <= self.temperature <= MAX_TEMPERATURE, "temperature", self.temperature, hottest)
        require(0 < self.top_p <= 1, "top_p", self.top_p, "greater than 0 and at most 1")
        _require_count("top_k", self.top_k, 0, "at least 1, or 0 (or -1) to keep all tokens")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        seed_fits = self.seed is None or -MAX_INTEGER - 1 <= self.seed <= MAX_INTEGER
        require(seed_fits, "seed", self.seed, "an integer of 64 bits, or None")
        _require_count("n", self.n, 1, "at least 1")

    def _check_penalties(self) -> None:
        for field in ("presence_penalty", "frequency_penalty"):
            require(-2 <= getattr(self, field) <= 2, field, getattr(self, field), "between -2 and 2")
        penalty = self.repetition_penalty
        fits = MIN_REPETITION_PENALTY <= penalty <= MAX_REPETITION_PENALTY
        allowed = f"between {MIN_REPETITION_PENALTY:f} and {MAX_REPETITION_PENALTY:,.0f}"
        require(fits, "repetition_penalty", penalty, allowed)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            least = 0 if self.prompt_logprobs is not None else 1
            allowed = "at least 1 (0 with prompt_logprobs), or None for no limit but the model's"
            _require_count("max_tokens", self.max_tokens, least, allowed)
        if self.budget_tokens is not None:
            _require_count("budget_tokens", self.budget_tokens, 1, "at least 1, or None for the engine's")
        if self.retain_blocks is not None:
            _require_count("retain_blocks", self.retain_blocks, 1, "at least 1, or None for the engine's")
        _require_count("min_tokens", self.min_tokens, 0, "at least 0")
        most = MAX_INTEGER if self.max_tokens is None else self.max_tokens
        require(self.min_tokens <= most, "min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        stop_fits = all(stop and is_unicode(stop) for stop in self.stop or [])
        require(stop_fits, "stop", self.stop, "strings of at least one character, in valid Unicode")
        found = self.detokenize or not self.stop
        require(found, "stop", self.stop, "only with detokenize=True, since it is looked for in the text")
        token_ids_fit = all(0 <= token_id <= MAX_INTEGER for token_id in self.stop_token_ids or [])
        require(token_ids_fit, "stop_token_ids", self.stop_token_ids, f"token ids, from 0 to {MAX_INTEGER}")
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(self, field)
            allowed = "at least 0, -1 for the whole vocabulary, or None"
            require(count is None or -1 <= count <= MAX_INTEGER, field, count, allowed)
        most = self.truncate_prompt_tokens
        allowed = "at least 1, -1 for as many as fit, or None for all"
        require(most is None or most == -1 or 1 <= most <= MAX_INTEGER, "truncate_prompt_tokens", most, allowed)

    def _check_tokens(self) -> None:
        bias = self.logit_bias or {}
        bias_fits = all(
            -MAX_BIAS <= value <= MAX_BIAS and 0 <= token_id <= MAX_INTEGER for token_id, value in bias.items()
        )
        require(bias_fits, "logit_bias", bias, f"numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}, by token id")
        allowed = self.allowed_token_ids
        allowed_fit = allowed is None or (allowed and all(0 <= token_id <= MAX_INTEGER for token_id in allowed))
        require(bool(allowed_fit), "allowed_token_ids", allowed, "at least one token id, or None for all")
        words_fit = all(word.strip() and is_unicode(word) for word in self.bad_words or ())
        require(words_fit, "bad_words", self.bad_words, "words of at least one letter, in valid Unicode")
        words = self.bad_words_token_ids or ()
        ids_fit = all(word and all(0 <= token_id <= MAX_INTEGER for token_id in word) for word in words)
        require(ids_fit, "bad_words_token_ids", self.bad_words_token_ids, "lists of at least one token id")


class BeamSearchParams(Options, frozen=True, kw_only=True):
    """Options of a beam search. Keywords only; a wrong value raises ConfigError when constructed.

    Attributes:
        beam_width: continuations that are followed at a time, and that are returned. At most 16.
        max_tokens: most tokens generated.
        ignore_eos: do not stop at the end-of-sequence token.
        length_penalty: finished beams are ranked by their log probability divided by their length to this power: a
            higher one prefers longer texts.
    """

    REFUSED: ClassVar[Refused] = {
        "temperature": ((0.0,), "beams are the likeliest texts"),
        "include_stop_str_in_output": ((False,), "a search has no stop strings"),
        "structured_outputs": ((), "a search obeys no rules: use n completions of LLM.generate"),
        "skip_special_tokens": ((True,), "the tokens are there, too"),
        "watermarking": ((False,), "no text is marked"),
    }

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        require(1 <= self.beam_width <= MAX_BEAMS, "beam_width", self.beam_width, f"between 1 and {MAX_BEAMS}")
        _require_count("max_tokens", self.max_tokens, 1, "at least 1")
        require(-10 <= self.length_penalty <= 10, "length_penalty", self.length_penalty, "between -10 and 10")


def _require_count(field: str, value: int, least: int, allowed: str) -> None:
    require(least <= value, field, value, allowed)
    require(value <= MAX_INTEGER, field, value, f"at most {MAX_INTEGER}, the largest integer of 64 bits")


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
