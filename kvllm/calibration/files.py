"""The files that a calibration writes beside a checkpoint."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from tqdm import tqdm

from kvllm.calibration.dense import DenseModel
from kvllm.calibration.layer_losses import SHARES, Sums, Windows, losses, measure
from kvllm.calibration.query_statistics import OUTLIERS, query_statistics
from kvllm.comparison.record import hash_of, model_files, write_json
from kvllm.comparison.texts import Text
from kvllm.compression.statistics import write_statistics
from kvllm.config import require
from kvllm.files.checkpoint import checkpoint_folder
from kvllm.layer_shares import LAYER_LOSSES_FILE, LayerLosses, convex

PARTIAL_FILE = "kv_layer_losses.partial.json"


class Partial(Struct):
    """Losses of some layers of some texts. settings: a hash of all that they depend on."""

    settings: str
    sums: Sums


def calibrate(path: Path, texts: Sequence[Text], name: str, windows: Windows | None = None) -> list[Path]:
    """Write the statistics of a checkpoint's queries on texts, and with `windows` what its layers lose.

    path: of the checkpoint. name: of the texts, for the files. Texts without a window tell no losses. Returns the paths
    of the files.
    Raises ConfigError before the work if texts are too short, or the folder cannot be written.
    """
    folder = checkpoint_folder(path)
    check_writable(folder)
    lengths = [text.stored + 1 for text in texts]
    require(min(lengths) > OUTLIERS, "--length", min(lengths), f"more than {OUTLIERS}")
    of_losses = [text for text in texts if windows is not None and windows.starts(text)]
    least = windows.size if windows else 0
    require(windows is None or bool(of_losses), "--length", max(lengths), f"more than {least} after a prompt")
    model = DenseModel(path, max(lengths))
    shown = tqdm(texts, desc="Statistics", disable=not sys.stderr.isatty())
    statistics = query_statistics(model, ([*text.prompt, *text.output] for text in shown))
    written = [write_statistics(folder, statistics, {"text": name, "tokens": str(sum(lengths))})]
    return written if windows is None else [*written, _write_losses(folder, model, of_losses, name, windows)]


def check_writable(folder: Path) -> None:
    """Raises ConfigError unless a file can be written beside a checkpoint, which is better known before the work."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        require(False, "--model", str(folder), f"a folder in which a file can be written ({error.strerror})")


def _write_losses(folder: Path, model: DenseModel, texts: Sequence[Text], name: str, windows: Windows) -> Path:
    """Measure what is not known yet, and write each layer as it comes."""
    partial, path = _read_partial(folder, texts, windows), folder / PARTIAL_FILE
    num_layers = model.config.num_layers
    total, known = num_layers * len(texts), sum(map(len, partial.sums))
    with tqdm(total=total, initial=known, desc="Layer losses", disable=not sys.stderr.isatty()) as bar:

        def advance() -> None:
            write_json(path, partial)
            bar.update()

        measure(model, texts, windows, partial.sums, advance)
    found = [convex(SHARES, of_layer) for of_layer in losses(texts, windows, partial.sums)]
    num_tokens = sum(text.stored + 1 for text in texts)
    write_json(folder / LAYER_LOSSES_FILE, LayerLosses(list(SHARES), found, name, num_tokens))
    path.unlink(missing_ok=True)
    return folder / LAYER_LOSSES_FILE


def _read_partial(folder: Path, texts: Sequence[Text], windows: Windows) -> Partial:
    """What an earlier command has measured with the same settings."""
    checkpoint = [file for file in model_files(folder) if not file[0].startswith("kv_")]
    settings = hash_of(checkpoint, texts, windows, SHARES)
    try:
        found = msgspec.json.decode((folder / PARTIAL_FILE).read_bytes(), type=Partial)
    except (OSError, msgspec.DecodeError):
        found = None
    return found if found is not None and found.settings == settings else Partial(settings, [])
