"""The text of one completion while its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from kvllm.sampling_params import SamplingParams
from kvllm.tokenizer import IncrementalDecoder, StopChecker, Tokenizer


class CompletionText:
    """Decodes tokens and looks for stop strings.

    prompt_token_ids: the tokens before the completion. The prompt's text and the completion's are one text, so a space
    between the two belongs to one of them.
    stream: decode every token when it comes. Without it, and without stop strings, which need it, all are decoded
    together at the end, which is a good deal cheaper.
    """

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_token_ids: Sequence[int], stream: bool
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, sampling.skip_special_tokens, prompt_token_ids)
        self._stops = StopChecker(sampling.stop or [], sampling.include_stop_str_in_output)
        self._min_tokens = sampling.min_tokens
        self._streams = stream or bool(sampling.stop)
        self._count = 0
        self._held: list[int] = []

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Text that is final now, and the stop string that ended it, if any."""
        self._count += 1
        self._held.append(token_id)
        return self._decode() if self._streams else ("", None)

    def finish(self) -> str:
        """The rest of the text; to be called once, unless a stop string ended it."""
        decoded, _ = self._decode()
        last, _ = self._stops.push(self._decoder.finish(), armed=False)
        return decoded + last + self._stops.finish()

    def _decode(self) -> tuple[str, str | None]:
        token_ids: Sequence[int] = self._held
        self._held = []
        return self._stops.push(self._decoder.push(token_ids), armed=self._count >= self._min_tokens)
