"""Speculative decoding beside none, one request at a time: tokens per second, and which drafts are right.

    python -m benchmarks.speculation models/SmolLM2-135M-Instruct --method suffix
    python -m benchmarks.speculation models/SmolLM2-135M-Instruct --draft models/SmolLM2-135M-Instruct \\
        --draft-quantization int4

Prompts are this project's own pages and files: code to be changed, pages to be summed up, questions about a page that
ask for quotations; and stories drawn at temperature 1, in which little repeats. Both engines get each prompt, in turns
that swap; in float32 their tokens have to be the same. The figures go to speculation.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from statistics import median
from typing import Any

from benchmarks.common import command_line, machine, report, tasks
from benchmarks.common.drafts import tried
from benchmarks.common.summary import show_spread, spread_of
from kvllm import LLM, RequestOutput, SamplingParams


def rate(output: RequestOutput) -> float:
    """Tokens per second after the first one."""
    begin, end = output.metrics.first_token_time, output.metrics.finished_time
    assert begin and end
    return (len(output.outputs[0].token_ids) - 1) / (end - begin)


def benchmark(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.speculation", __doc__)
    parser.add_argument("model")
    parser.add_argument("--method", default="suffix", help="of speculative_config (default suffix)")
    parser.add_argument("--draft", help="the model of method draft_model, which this chooses")
    parser.add_argument("--draft-quantization", help="of its weights")
    parser.add_argument("--num-tokens", type=int, default=8, help="most tokens of a draft (default 8)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=600, help="tokens of a text (default 600)")
    parser.add_argument("--output-len", type=int, default=256, help="tokens generated (default 256)")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    options = {"dtype": args.dtype, "max_model_len": 4096, "max_num_seqs": 16, "enable_prefix_caching": False}
    drafts: dict[str, Any] = {"method": args.method, "num_speculative_tokens": args.num_tokens}
    if args.draft:
        drafts |= {"method": "draft_model", "model": args.draft, "quantization": args.draft_quantization}
    plain, drafting = LLM(args.model, **options), LLM(args.model, speculative_config=drafts, **options)
    provenance, rows = machine.announce("benchmarks.speculation", arguments), {}
    print(
        "| task | tokens/s without | with | ratio, median (range) | right drafts by position |\n|---|---|---|---|---|"
    )
    for kind, of_kind in tasks.prompts(plain.get_tokenizer(), args.length).items():
        without, others, before = [], [], copy(drafting.stats().drafts)
        for turn, prompt in enumerate(of_kind):
            temperature = float(kind == "stories")
            params = SamplingParams(temperature=temperature, seed=turn, max_tokens=args.output_len, ignore_eos=True)
            texts = []
            for llm in (plain, drafting) if turn % 2 else (drafting, plain):
                output = llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)[0]
                (without if llm is plain else others).append(rate(output))
                texts.append(output.outputs[0].token_ids)
            if args.dtype == "float32" and texts[0] != texts[1]:
                raise RuntimeError(f"{kind}, text {turn}: drafts have changed tokens")
        ratios = [fast / slow for fast, slow in zip(others, without, strict=True)]
        found = tried(before, drafting.stats().drafts)
        spread = show_spread(spread_of(ratios), "{:.2f}")
        shares = " ".join(f"{share:.2f}" for share in found.right)
        print(f"| {kind} | {median(without):.0f} | {median(others):.0f} | {spread} | {shares} |", flush=True)
        rows[kind] = {"without": without, "with": others, "drafts": found.drafts, "right": found.right}
    report.write_json(args.output / "speculation.json", {**provenance, "tasks": rows})


if __name__ == "__main__":
    command_line.run_script(benchmark)
