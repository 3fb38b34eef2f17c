"""Write statistics of a model's queries and the losses of its layers beside it, which some compressions need.

    kvllm calibrate path/to/Qwen3-0.6B
    kvllm calibrate path/to/Qwen3-0.6B --text manual.txt main.py --pieces 32 --layer-losses
    kvllm calibrate path/to/Qwen3-0.6B --text manual.txt main.py --gates dms

kv_statistics.safetensors has the mean, the covariance and the lengths of the queries of each layer and head before
rotary embedding, for the methods expected_attention_calibrated and triattention. The texts should have all kinds of
what the model will write, for KV pairs that only other kinds ask for are dropped. The file takes 4 bytes for each of
d * d + 1.5 * d numbers of a query head: 65 MiB for 32 layers of 32 heads with 128 channels.

kv_layer_losses.json, with --layer-losses, has what the model loses when one layer alone compresses, for
layer_groups="auto". Each piece is read again for each layer and share: minutes for a small model on a CPU. The same
command goes on where an earlier one was cut off. The model is computed in float32.

kv_gates_METHOD.safetensors, with --gates and in place of the others, has the trained gates of dms or trimkv. Each step
reads a piece twice and learns to predict the same with fewer KV pairs: minutes for a small model on a CPU. The file
takes 4 bytes for each of 32 (2 d + 2) + 1 numbers of a KV head: 9 MiB for 32 layers of 8 KV heads with 128 channels.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvllm.config import require
from kvllm.engine_args import EngineArgs
from kvllm.entrypoints.model_argument import add_model_argument, add_revision_argument

PIECES, PIECES_OF_GATES = 8, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_argument(parser, "directory of a checkpoint, where the files are written, or the id of a hub's model")
    add_revision_argument(parser)
    shipped = "texts, as many pieces of each (default: a manual and source code that come with Python)"
    add("--text", type=Path, nargs="+", metavar="FILE", help=shipped)
    pieces = f"pieces of all texts together (default: {PIECES}; for --gates {PIECES_OF_GATES})"
    add("--pieces", type=int, metavar="N", help=pieces)
    add("--length", type=int, default=768, metavar="N", help="tokens of a piece (default: 768)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--layer-losses", action="store_true", help="measure what each layer loses, too")
    kinds.add_argument("--gates", choices=("dms", "trimkv"), help="train the gates of this method instead")
    add("--retention", type=float, default=0.2, metavar="R", help="share of the KV pairs to train for (default: 0.2)")
    add("--delay", type=int, default=128, metavar="N", help="last KV pairs, which gates leave alone (default: 128)")
    add("--steps", type=int, default=400, metavar="N", help="of the training of gates (default: 400)")


def run(args: argparse.Namespace) -> None:
    from kvllm.calibration.files import calibrate  # with torch; a typing error should not wait for it
    from kvllm.calibration.layer_losses import Windows
    from kvllm.calibration.query_statistics import OUTLIERS
    from kvllm.calibration.train_gates import SHORTEST, Settings, train_gates
    from kvllm.comparison.texts import Cut, cut_texts, read_files, shipped_texts
    from kvllm.tokenizer import load_tokenizer

    windows = Windows() if args.layer_losses else None
    shortest = SHORTEST if args.gates else OUTLIERS if windows is None else windows.size
    require(args.length > shortest, "--length", args.length, f"more than {shortest}")
    require(args.model is not None, "MODEL", args.model, "the directory of a checkpoint, where files can be written")
    model = EngineArgs(args.model, revision=args.revision, max_model_len=args.length)
    _ = model.model_config  # which checks the length
    model.fetch_weights()
    sources = shipped_texts() if args.text is None else read_files(args.text)
    default = PIECES_OF_GATES if args.gates else PIECES
    pieces = default if args.pieces is None else args.pieces
    texts = cut_texts(sources, Cut(pieces, args.length, prompt_tokens=0), load_tokenizer(str(model.path)))
    name = ", ".join(sources)
    if args.gates:
        written = [train_gates(model.path, texts, name, Settings(args.gates, args.retention, args.delay, args.steps))]
    else:
        written = calibrate(model.path, texts, name, windows)
    for path in written:
        print(f"Written: {path}, from {pieces * args.length:,} tokens")
