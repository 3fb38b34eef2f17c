"""Names of tensors and modules of multimodal checkpoints, and those that they have in the text model alone."""

from __future__ import annotations

PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
}
OF_IMAGES = ("visual.", "vision_tower.", "multi_modal_projector.", "embed_vision.", "audio_tower.", "embed_audio.")


def text_name(name: str) -> str | None:
    """The name in the text model of a tensor or module; None for those of images and sounds."""
    for prefix, own in PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return None if name.removeprefix("model.").startswith(OF_IMAGES) else name
