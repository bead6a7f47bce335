"""Models that upstream's tests ask for by name and of which they read nothing but the public numbers of config.json.

Offline, a folder of that name in the working directory answers for the model. Tests that want weights, a tokenizer or
any other model fail alike with kvmend and without.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 768,
        "word_embed_proj_dim": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "torch_dtype": "float16",
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    },
    # What a ModelConfig is of if nobody says otherwise.
    "Qwen/Qwen3-0.6B": _QWEN
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "eos_token_id": 151645,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen1.5-7B": _QWEN
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "eos_token_id": 151643,
        "tie_word_embeddings": False,
    },
}


def write_models(folder: Path) -> None:
    """Puts the stand-ins into a working directory; what is there already is replaced."""
    for name, config in CONFIGS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
