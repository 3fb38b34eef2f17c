"""One request in flight. The tokens that its completions have are the truth: all else can be made again from them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace

from msgspec import structs

from kvllm.core.sequence import ANONYMOUS, Sequence, ServiceClass, fork_seed
from kvllm.core.text import CompletionText
from kvllm.outputs import RequestOutput
from kvllm.sampling_params import RequestOutputKind, SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """The output that the caller holds, and the sequences that still run.

    seq_id, seed: of the first completion's sequence; the others' follow from them.
    max_length, tail_start, service_class: as in Sequence.
    stream: keep the text current at every step.
    sequences: the unfinished ones, by index of the completion. Before the prompt is computed there is one alone, from
        which the others branch off.
    texts: one for each completion, if there is a tokenizer.
    shown_lengths: tokens and characters of each completion that were given out, where only what is new is.
    """

    output: RequestOutput
    sampling: SamplingParams
    _: KW_ONLY
    seq_id: int
    seed: int
    max_length: int
    tail_start: int | None
    stream: bool
    service_class: ServiceClass = ANONYMOUS
    sequences: dict[int, Sequence] = field(default_factory=dict)
    texts: list[CompletionText] = field(default_factory=list)
    shown_lengths: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.shown_lengths = [(0, 0)] * self.sampling.n

    @property
    def request_id(self) -> str:
        return self.output.request_id

    @property
    def is_branched(self) -> bool:
        """Whether the completions have sequences of their own."""
        return any(completion.token_ids for completion in self.output.outputs)

    def shown(self) -> RequestOutput | None:
        """The output as `sampling.output_kind` wants it now, None for not at all."""
        kind = self.sampling.output_kind
        if kind is RequestOutputKind.DELTA:
            return self._delta()
        is_due = kind is not RequestOutputKind.FINAL_ONLY or self.output.finished
        return self.output if is_due else None

    def _delta(self) -> RequestOutput | None:
        """What was not given out yet."""
        new = []
        for i, completion in enumerate(self.output.outputs):
            tokens, characters = self.shown_lengths[i]
            self.shown_lengths[i] = len(completion.token_ids), len(completion.text)
            if self.shown_lengths[i] != (tokens, characters) or self.output.finished:
                logprobs = completion.logprobs and completion.logprobs[tokens:]
                text, token_ids = completion.text[characters:], completion.token_ids[tokens:]
                new.append(replace(completion, text=text, token_ids=token_ids, logprobs=logprobs))
        return replace(self.output, outputs=new) if new else None

    def limit(self, max_length: int) -> None:
        """Let the completions end at `max_length`, if that is earlier than they would."""
        if max_length < self.max_length:
            self.max_length = max_length
            most = max_length - len(self.output.prompt_token_ids)
            self.sampling = structs.replace(self.sampling, max_tokens=most)
            self.make_sequences()

    def make_sequences(self) -> None:
        """Replace `sequences` by fresh ones that have the completions' tokens and nothing in the cache."""
        for seq in self.sequences.values():
            seq.reset()
        if not self.is_branched:
            self.sequences = {0: self._make_sequence(0, forks=len(self.output.outputs) - 1)}
            return
        unfinished = [completion.index for completion in self.output.outputs if not completion.finished()]
        self.sequences = {index: self._make_sequence(index) for index in unfinished}

    def _make_sequence(self, index: int, forks: int = 0) -> Sequence:
        seq = Sequence(
            self.seq_id + index,
            self.request_id,
            self.output.prompt_token_ids[:],
            self.sampling,
            seed=fork_seed(self.seed, index),
            max_length=self.max_length,
            index=index,
            forks=forks,
            tail_start=self.tail_start,
            service_class=self.service_class,
            metrics=self.output.metrics,
        )
        seq.extend(self.output.outputs[index].token_ids)
        return seq
