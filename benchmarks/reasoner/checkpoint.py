"""The reasoner as a Hugging Face checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from benchmarks.reasoner import model as shape
from benchmarks.reasoner.tokenizer import EOS, PAD, TOKEN_IDS, build_tokenizer


def save_checkpoint(model: shape.Reasoner, out: Path) -> None:
    """Write config, float32 weights and tokenizer as transformers' Qwen3ForCausalLM and AutoTokenizer read them."""
    out.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(TOKEN_IDS),
        "hidden_size": shape.HIDDEN,
        "intermediate_size": shape.INTERMEDIATE,
        "num_hidden_layers": shape.NUM_LAYERS,
        "num_attention_heads": shape.NUM_HEADS,
        "num_key_value_heads": shape.NUM_KV_HEADS,
        "head_dim": shape.HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": shape.RMS_EPS,
        "rope_theta": shape.ROPE_THETA,
        "max_position_embeddings": shape.CONTEXT,
        "tie_word_embeddings": True,
        "eos_token_id": TOKEN_IDS[EOS],
        "pad_token_id": TOKEN_IDS[PAD],
        "torch_dtype": "float32",
    }
    generation = {"do_sample": False, "eos_token_id": TOKEN_IDS[EOS], "pad_token_id": TOKEN_IDS[PAD]}
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.CONTEXT,
    }
    for name, content in [("config", config), ("generation_config", generation), ("tokenizer_config", tokenizer)]:
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    build_tokenizer().save(str(out / "tokenizer.json"))
    weights = {f"model.{name}": p.detach().float().contiguous() for name, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
