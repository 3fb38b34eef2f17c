"""What a client has of a request, held against what the request gives alone."""

from __future__ import annotations

from typing import cast

from kvllm.config import EngineConfig
from kvllm.structured.compile import Grammars
from tests.deterministic.clients import Got
from tests.deterministic.oracle import Alone, ending
from tests.deterministic.scenario import TEXT_ROUTES, Arrival
from tests.helpers.tokenizers import byte_level


class AnswerCheck:
    """Of one request, if it was computed with an adapter. failures: what is other than alone.

    prompt: of the model. cut: whether a completion may have ended early, for another reason than abortion.
    """

    def __init__(
        self, config: EngineConfig, grammars: Grammars | None, name: str, arrival: Arrival, prompt: list[int]
    ) -> None:
        self.config = config
        self.grammars = grammars
        self.name = name
        self.arrival = arrival
        self.prompt = prompt
        self.params = arrival.params
        self.compressed = config.compression is not None and self.params.compress

    def failures(self, got: Got, adapter: str) -> list[str]:
        """What is other than alone, with an adapter."""
        model = Alone(self.config, self.grammars, adapter)
        if self.arrival.via == "beam":
            return self._of_search(model, got)
        found = self._of_prompt(model, got)
        for index, tokens in enumerate(got.tokens):
            if not tokens and (got.error is not None or got.left or "abort" in got.reasons):
                continue
            aborted = self.arrival.abort_at is not None and got.reasons[index] == "abort"
            cut = got.error is not None or got.left or aborted or bool(self.params.stop)
            reason = None if cut else str(got.reasons[index])
            if self.arrival.route in TEXT_ROUTES:
                found += [] if self.compressed else self._of_text(model, got.text, reason)
            elif self.compressed:
                found += self._of_compressed(index, tokens, reason)
            else:
                found += self._of_full(model, index, tokens, reason)
        return found

    def _of_search(self, model: Alone, got: Got) -> list[str]:
        if got.error is None and not got.left and "abort" not in got.reasons:
            expected = model.search(self.prompt, self.arrival.beams)
            if got.tokens != expected:
                return [f"request {self.name}: {got.tokens} and not {expected} as alone"]
        return []

    def _of_prompt(self, model: Alone, got: Got) -> list[str]:
        """Its tokens have the log probabilities that they have alone."""
        if self.params.prompt_logprobs is None or not any(got.reasons) or got.error or got.left:
            return []
        expected, found, compression = model.prompt_logprobs(self.prompt), got.prompt_logprobs, self.config.compression
        keeps_prompt = compression is None or not (
            compression.compress_prompt or getattr(compression.policy, "protect_prompt", None) is False
        )
        if len(found) == len(expected) and (found == expected or not keeps_prompt):
            return []
        if "abort" in got.reasons and (found == expected[: len(found)] or not keeps_prompt):
            return []
        return [f"request {self.name}: log probabilities {found} and not {expected} of its prompt"]

    def _of_text(self, model: Alone, text: str, reason: str | None) -> list[str]:
        """reason: why it ended; None if it may have ended early."""
        tokens, why = model.complete(self.prompt, self.params, 0)
        expected = cast("str", byte_level("chat").hf.decode(tokens, skip_special_tokens=True))
        if not expected.startswith(text):
            return [f"request {self.name}: {text!r} and not {expected!r} as alone"]
        if reason and (text, reason) != (expected, why):
            return [f"request {self.name} ends with {text!r} by {reason}, alone with {expected!r} by {why}"]
        return []

    def _of_full(self, model: Alone, index: int, tokens: list[int], reason: str | None) -> list[str]:
        """reason: as there."""
        expected, name = model.complete(self.prompt, self.params, index), f"request {self.name}, completion {index}"
        if tokens != expected[0][: len(tokens)]:
            return [f"{name}: {tokens} and not {expected[0]} as alone"]
        if reason and (tokens, reason) != expected:
            return [f"{name} ends with {tokens} by {reason}, alone with {expected}"]
        return []

    def _of_compressed(self, index: int, tokens: list[int], reason: str | None) -> list[str]:
        """Its tokens were checked where they were made; here, where it ends."""
        most, name = self.config.max_model_len - len(self.prompt), f"request {self.name}, completion {index}"
        most = most if self.params.max_tokens is None else min(self.params.max_tokens, most)
        ends = [ending(tokens[:count], self.params, most) for count in range(len(tokens) + 1)]
        if any(ends[:-1]):
            return [f"{name} goes on after its end: {tokens}"]
        if reason and ends[-1] != reason:
            return [f"{name} ends by {reason}: {tokens}"]
        return []
