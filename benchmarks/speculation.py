"""Speculative decoding beside none, one request at a time: tokens per second, and which drafts are right.

    python -m benchmarks.speculation models/SmolLM2-135M-Instruct --method suffix

Prompts are this project's own pages and files: code to be changed, pages to be summed up, questions about a page that
ask for quotations; and random tokens, after which nothing is worth a draft. Both engines get each prompt, in turns that
swap, and give the same tokens. The figures go to speculation.json.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from statistics import median

from benchmarks.common import command_line, machine, report
from kvllm import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
PAGES = ("tiers", "backends", "distributed", "models", "simulation", "troubleshooting")
FILES = ("core/queue", "core/step", "config/tenant", "worker/launched", "core/tables", "core/preemption")
TASKS = {
    "edits": "Write this file again, with {name} called {other} everywhere, and nothing else changed:\n\n{text}",
    "summaries": "Sum up the most important points of this page:\n\n{text}",
    "quotations": "Answer with sentences of the page, word by word: what are its limits?\n\n{text}",
}


def prompts(llm: LLM, length: int) -> dict[str, list[list[int]]]:
    """Token ids by the kind of task."""
    tokenizer, rng, found = llm.get_tokenizer(), random.Random(0), {}
    for kind, task in TASKS.items():
        paths = [ROOT / f"kvllm/{name}.py" for name in FILES]
        if kind != "edits":
            paths = [ROOT / f"docs/{name}.md" for name in PAGES]
        found[kind] = []
        for path in paths:
            text = tokenizer.decode(tokenizer.encode(path.read_text())[:length])
            content = task.format(text=text, name="self", other="this")
            messages = [{"role": "user", "content": content}]
            found[kind].append(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
    vocabulary = llm.model_config.vocab_size
    found["random tokens"] = [rng.choices(range(vocabulary), k=length) for _ in PAGES]
    return found


def benchmark(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.speculation", __doc__)
    parser.add_argument("model")
    parser.add_argument("--method", default="suffix", help="of speculative_config (default suffix)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=600, help="tokens of a text (default 600)")
    parser.add_argument("--output-len", type=int, default=256, help="tokens generated (default 256)")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    options = {"dtype": args.dtype, "max_model_len": 4096, "max_num_seqs": 16, "enable_prefix_caching": False}
    engines = {
        "none": LLM(args.model, **options),
        args.method: LLM(args.model, speculative_config={"method": args.method}, **options),
    }
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
    provenance, rows = machine.announce("benchmarks.speculation", arguments), {}
    print(
        "| task | tokens/s without | with | ratio, median (range) | right drafts by position |\n|---|---|---|---|---|"
    )
    for kind, of_kind in prompts(engines["none"], args.length).items():
        rates = {name: [] for name in engines}
        before = copy(engines[args.method].stats().drafts)
        for turn, prompt in enumerate(of_kind):
            found = {}
            for name in sorted(engines, reverse=bool(turn % 2)):
                output = engines[name].generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
                first, end = output.metrics.first_token_time, output.metrics.finished_time
                rates[name].append((args.output_len - 1) / (end - first))
                found[name] = output.outputs[0].token_ids
            assert found["none"] == found[args.method] or args.dtype != "float32"
        ratios = [fast / slow for fast, slow in zip(rates[args.method], rates["none"], strict=True)]
        after = engines[args.method].stats().drafts
        drafts = after.drafts - before.drafts
        right = [now - (before.right[i : i + 1] or [0])[0] for i, now in enumerate(after.right)]
        shares = " ".join(f"{each / drafts:.2f}" for each in right) if drafts else "none"
        print(
            f"| {kind} | {median(rates['none']):.0f} | {median(rates[args.method]):.0f} | {median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f}) | {shares} |",
            flush=True,
        )
        rows[kind] = {"tokens_per_s": rates, "ratios": ratios, "drafts": drafts, "right": right}
    report.write_json(args.output / "speculation.json", {**provenance, "tasks": rows})


if __name__ == "__main__":
    command_line.run_script(benchmark)
