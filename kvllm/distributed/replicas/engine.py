"""Several engines as one: requests are spread over replicas, and those of a lost replica go on in another."""

from __future__ import annotations

from kvllm.config import EngineConfig
from kvllm.core.input_processor import InputProcessor
from kvllm.core.output_processor import OutputProcessor
from kvllm.core.sequence import Sequence, ServiceClass
from kvllm.core.snapshot import EngineSnapshot
from kvllm.core.transition import Transition
from kvllm.distributed.replicas.dispatcher import Dispatcher
from kvllm.distributed.replicas.messages import Report
from kvllm.distributed.replicas.replica_set import ReplicaSet
from kvllm.distributed.replicas.snapshots import Snapshots
from kvllm.lora.files import Adapters
from kvllm.lora.request import Adapter, LoRARequest
from kvllm.outputs import RequestOutput
from kvllm.prompts import Prompt
from kvllm.sampling_params import SamplingParams
from kvllm.stats import EngineStats
from kvllm.structured.checker import GrammarChecker
from kvllm.tokenizer import Tokenizer


class DataParallelEngine:
    """Does what LLMEngine does, with tokens that come from replicas.

    config: that of each replica, except that their pools may differ: it has as many blocks as the smallest.
    """

    def __init__(
        self,
        config: EngineConfig,
        replicas: ReplicaSet,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Tokenizer | None = None,
        grammars: GrammarChecker | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.config = config
        self.replicas = replicas
        self.stats = EngineStats(num_blocks=sum(replicas.num_blocks))
        self.inputs = InputProcessor(config, vocab_size, tokenizer, grammars, adapters)
        self.outputs = OutputProcessor(frozenset(eos_token_ids), tokenizer)
        self.dispatcher = Dispatcher(config, replicas.num_blocks)
        self._snapshots = Snapshots(replicas.num_blocks)
        self._last_steps = [(0, 0)] * len(replicas.num_blocks)
        self._waiting = [0] * len(replicas.num_blocks)  # in each replica, when it last reported
        self._transition = Transition(self._recover)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        stream: bool = True,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str | None = None,
        lora_request: LoRARequest | Adapter | None = None,
    ) -> RequestOutput:
        """See LLMEngine."""
        self.outputs.check_id(request_id)
        service_class = ServiceClass(priority, tenant, cache_salt, self.inputs.adapter_of(lora_request))
        request = self.inputs.new_request(request_id, prompt, sampling_params, stream, service_class)
        self.outputs.prepare(request)
        request.limit(self.dispatcher.longest_of(request.sequences[0]))
        with self._transition():
            self.dispatcher.add(request.sequences[0])
            self.outputs.requests[request_id] = request
            self._count_now()
        return request.output

    def abort(self, request_id: str) -> None:
        """See LLMEngine."""
        with self._transition():
            for seq in self.outputs.abort(request_id):
                replica = self.dispatcher.replica_of(seq)
                if replica is not None:  # it may have the sequence as a branch of the first
                    self.replicas.drop(replica, [seq.seq_id, seq.seq_id - seq.index])
                self.dispatcher.finish(seq)
            for replica in range(len(self.replicas.num_blocks)):
                if not self.dispatcher.is_in_use(replica):
                    self._rest(replica)
            self._count_now()

    def reset_prefix_cache(self) -> None:
        """See LLMEngine."""
        self.replicas.reset_prefix_cache()

    def has_unfinished_requests(self) -> bool:
        return bool(self.outputs.requests)

    def step(self) -> list[RequestOutput]:
        """Hand out requests and wait for tokens of some replica, but not for ever. Returns what LLMEngine does."""
        with self._transition():
            self.dispatcher.dispatch()
            for replica in self.replicas.free():
                starts = self.dispatcher.take(replica)
                if starts is not None:
                    self.replicas.send(replica, starts)
            for replica, report in self.replicas.receive():
                self._receive(replica, report)
            self._count_now()
        return self.outputs.take_touched()

    def snapshot(self, now: float) -> EngineSnapshot:
        """See LLMEngine. What replicas tell is a fraction of a second old."""
        return self._snapshots.merge(self.dispatcher, self.outputs.requests, self.stats, now)

    def num_computed(self, seq: Sequence) -> int:
        """See LLMEngine. Tokens that are computed again count at once, and so does a prompt of which a part was
        compressed."""
        if seq.num_generated:
            return seq.num_tokens - 1
        return seq.prompt_length if seq.compressions else 0

    def close(self) -> None:
        self.inputs.close()
        self.replicas.close()

    def _receive(self, replica: int, report: Report | None) -> None:
        if report is None:
            self._rest(replica)
            self._snapshots.lose(replica)
            self.dispatcher.lose(replica)
            return
        self._count(replica, report)
        self._snapshots.receive(replica, report.snapshot)
        for sampled, prompts in self.dispatcher.receive(replica, report):
            _, ended = self.outputs.process(sampled, prompts)
            for seq in ended:
                self.dispatcher.finish(seq)

    def _rest(self, replica: int) -> None:
        """A replica has nothing any more, and may not report that."""
        self._last_steps[replica], self._waiting[replica] = (0, 0), 0
        self._snapshots.rest(replica)

    def _recover(self) -> None:
        """Let the replicas drop everything, and hand it out again under new ids: reports of the old ones may still
        come."""
        for replica in range(len(self.replicas.num_blocks)):
            self.replicas.drop(replica, self.dispatcher.sent(replica))
        for request in self.outputs.requests.values():
            request.seq_id = self.inputs.take_seq_ids(request.sampling.n)
        self.dispatcher.reset(self.outputs.restore())

    def _count(self, replica: int, report: Report) -> None:
        """Add to the stats. A step of one replica is a step of all, in which the others are as they last were."""
        counted = report.stats
        timeline, counted.packed_timeline = counted.timeline, bytearray()
        counted.steps = counted.peak_blocks = 0
        self._waiting[replica] = counted.num_waiting
        self.stats.add(counted)
        for step in timeline:
            self._last_steps[replica] = step
            running, blocks = map(sum, zip(*self._last_steps, strict=True))
            self.stats.record_step(running=running, blocks=blocks)
        if not report.busy:
            self._last_steps[replica] = (0, 0)

    def _count_now(self) -> None:
        stats, dispatcher, waiting = self.stats, self.dispatcher, sum(self._waiting)
        stats.num_running = max(0, len(dispatcher.placed) - waiting)
        stats.num_waiting = len(dispatcher.waiting) + waiting
        stats.blocks_in_use = sum(blocks for _, blocks in self._last_steps)
