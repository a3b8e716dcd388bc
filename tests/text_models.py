"""Tiny random models in folders, with a tokenizer of single bytes: everything a text pipeline
reads.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 300
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHARED = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
FAMILIES = {
    "llama": _SHARED,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gemma3_text": _SHARED
    | {"sliding_window": 12, "num_hidden_layers": 6, "query_pre_attn_scalar": 8},
    "gemma2": _SHARED
    | {"sliding_window": 12, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
}

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
PACKED = FAMILIES | {
    "qwen3": _SHARED,
    "mistral": _SHARED | {"sliding_window": 12},
    "phi3": _SHARED,
    "gpt_oss": _SHARED
    | {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": _SHARED
    | _EXPERTS
    | {
        "num_key_value_heads": 4, "head_dim": 4, "n_routed_experts": 4, "n_shared_experts": 1,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 16,
    },
}  # fmt: skip
ALONE = {
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
               "max_position_embeddings": 256},
    "qwen3_next": _SHARED
    | _EXPERTS
    | {
        "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
    },
    "bamba": _SHARED
    | {
        "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16,
        "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 8,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "intermediate_size": 64,
              "max_position_embeddings": 256},
}  # fmt: skip


def tokenizer() -> Tokenizer:
    """A token per byte, and two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    )
    return made


def write_words(folder: Path) -> Path:
    """What a front needs of a model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    words = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


def write_model(folder: Path, family: str, **changed: object) -> Path:
    """A random model of a family; its weights are large, so that logits lie far apart."""
    torch.manual_seed(0)
    common = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 256, "eos_token_id": 257}
    config = CONFIG_MAPPING[family](**(common | (PACKED | ALONE).get(family, {}) | changed))
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.4 if "embed" in name or "wte" in name else 0.2)
    model.save_pretrained(folder)
    return write_words(folder)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Ragged prompts of byte tokens."""
    chance = random.Random(seed)
    return [[chance.randrange(256) for _ in range(chance.randrange(1, 40))] for _ in range(count)]
