"""Tiny random T5 and BART in folders, with a tokenizer of single bytes: everything that a pipeline
for summaries reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 264
PAD, END, START = 256, 257, 258
ENDS = (END, *range(40, 48))  # several, and some of them likely
LENGTH = 128  # tokens that BART's positions allow, and that its tokenizer says for T5
_COMMON = {
    "vocab_size": VOCABULARY, "d_model": 32, "pad_token_id": PAD, "eos_token_id": END,
    "bos_token_id": START,
}  # fmt: skip
_T5 = _COMMON | {
    "d_kv": 16, "d_ff": 37, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
    "decoder_start_token_id": PAD, "relative_attention_max_distance": 20,
    "task_specific_params": {
        "summarization": {"prefix": "summarize: ", "no_repeat_ngram_size": 3}
    },
}  # fmt: skip
_BART = _COMMON | {
    "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 41,
    "max_position_embeddings": LENGTH, "decoder_start_token_id": END, "forced_eos_token_id": END,
    "task_specific_params": {"summarization": {"no_repeat_ngram_size": 2}},
}  # fmt: skip
FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "t5": (T5Config, T5ForConditionalGeneration, _T5),
    "t5v1.1": (
        T5Config,
        T5ForConditionalGeneration,
        _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "bart": (
        BartConfig,
        BartForConditionalGeneration,
        _BART | {"scale_embedding": True},
    ),
    "mbart": (MBartConfig, MBartForConditionalGeneration, _BART),
    "pegasus": (PegasusConfig, PegasusForConditionalGeneration, _BART),
}


def tokenizer() -> Tokenizer:
    """A token per byte, an end after every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<pad>", "</s>", "<s>")])
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", END)]
    )
    return made


def write_words(folder: Path) -> None:
    """What a front needs of a model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    words = {"pad_token": "<pad>", "eos_token": "</s>", "model_max_length": LENGTH}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))


def make(family: str, seed: int = 0, **changed: Any) -> Any:
    """A random model of a family; its weights are large, so that logits lie far apart, and its
    answers end now and then.
    """
    torch.manual_seed(seed)
    config, kind, settings = FAMILIES[family]
    model = kind(config(**(settings | changed))).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            many = any(word in name for word in ("shared", "embed", "relative", "lm_head"))
            unscaled = name.endswith(".q.weight")  # T5 does not scale its scores
            torch.nn.init.normal_(weight, std=0.6 if many else 0.075 if unscaled else 0.3)
    model.generation_config.eos_token_id = list(ENDS)
    if family == "bart":
        model.final_logits_bias.normal_(std=0.5)
        model.generation_config.forced_bos_token_id = START
    return model


def write(folder: Path, family: str, seed: int = 0, **changed: Any) -> Path:
    """The model and its words in a folder."""
    make(family, seed, **changed).save_pretrained(folder)
    write_words(folder)
    return folder
