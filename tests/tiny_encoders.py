"""Tiny random encoders in folders, with tokenizers of a few words: everything an encoder's pipeline
and its fronts read. Words that no tokenizer knows fall into letters or bytes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors as post
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pipelines.oneshot import Blank, Item, ItemsJob, Pool
from pipelines.readings import READINGS

CONTEXT = 48
WORDS = (
    "the a is was not and of in to it this text about dog cat bird lake house river water barked "
    "sleeps opened library closes who when where what sport politics cooking green blue old"
).split()
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?-'"
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
NAMES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
BYTES = {"roberta", "bart", "mpnet"}  # families whose tokenizers are of bytes
LABELS = {0: "CONTRADICTION", 1: "neutral", 2: "Entailment"}
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": _SIZES | {"max_position_embeddings": CONTEXT},
    "electra": _SIZES | {"embedding_size": 32, "max_position_embeddings": CONTEXT},
    "roberta": _SIZES | {"max_position_embeddings": CONTEXT + 2, "type_vocab_size": 1},
    "distilbert": {
        "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64,
        "max_position_embeddings": CONTEXT,
    },
    "bart": {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "max_position_embeddings": CONTEXT, "decoder_start_token_id": 2,
    },
    "mpnet": _SIZES | {"max_position_embeddings": CONTEXT + 2},
}  # fmt: skip


def of_words() -> Tokenizer:
    """As BERT has it: words, and pieces of words."""
    pieces = [*BERT, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = post.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.add_special_tokens([AddedToken(token, special=True) for token in BERT])
    return made


def of_bytes() -> Tokenizer:
    """As RoBERTa has it: bytes, and words with the space before them; its mask takes that space."""
    tokens = [*ROBERTA, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    for word in WORDS:
        whole = "Ġ"
        for letter in word:
            merges.append((whole, letter))
            whole += letter
            tokens.append(whole)
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys(tokens))}
    made = Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges))))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = post.RobertaProcessing(("</s>", 2), ("<s>", 0))
    made.add_special_tokens([AddedToken(token, special=True) for token in ROBERTA[:-1]])
    made.add_special_tokens([AddedToken("<mask>", special=True, lstrip=True)])
    return made


def tokenizer(family: str) -> Tokenizer:
    return of_bytes() if family in BYTES else of_words()


def write_words(folder: Path, family: str) -> Path:
    """What a front needs of a model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer(family).save(str(folder / "tokenizer.json"))
    order = (1, 3, 0, 2, 4) if family in BYTES else range(5)
    special = [(ROBERTA if family in BYTES else BERT)[place] for place in order]
    (folder / "tokenizer_config.json").write_text(
        json.dumps(dict(zip(NAMES, special, strict=True)))
    )
    return folder


def write_encoder(folder: Path, family: str, task: str, **changed: Any) -> Path:
    """A random model with a task's head; its weights are large, so that numbers lie far apart."""
    torch.manual_seed(0)
    many = tokenizer(family).get_vocab_size()
    ends = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2} if family in BYTES else {}
    named = {"id2label": LABELS, "label2id": {name: n for n, name in LABELS.items()}}
    common = {"vocab_size": many, "pad_token_id": 0} | ends
    common |= named if task == "classify" else {}
    config = CONFIG_MAPPING[family](**(common | FAMILIES[family] | changed))
    model = getattr(transformers, READINGS[task].head).from_config(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.5 if "embed" in name else 0.2)
    model.save_pretrained(folder)
    return write_words(folder, family)


def asks(task: str, count: int, chance: random.Random) -> Any:
    """What may be asked of an item of so many tokens."""
    if task == "embed":
        return Pool(chance.choice(["mean", "cls", "last"]), chance.random() < 0.5)
    if task == "fill":
        places = sorted(chance.sample(range(count), min(count, 1 + chance.randrange(3))))
        return Blank(tuple(places), 5, (20, 30, 40) if chance.random() < 0.5 else ())
    return None


def item(family: str, task: str, seed: int, most: int = CONTEXT) -> Item:
    """A ragged item of one text or of two, with control tokens where its model looks for them."""
    chance = random.Random(seed)
    count = chance.randrange(3, most + 1)
    tokens = [chance.randrange(10, 75) for _ in range(count)]
    tokens[-1] = 2 if family in BYTES else 3
    second = chance.randrange(count - 1) if family in ("bert", "electra") else 0
    return Item(tuple(tokens), second, asks(task, count, chance))


def job(family: str, task: str, seed: int, items: int = 3, most: int = CONTEXT) -> ItemsJob:
    return ItemsJob(tuple(item(family, task, 1000 * seed + n, most) for n in range(items)))


def truth(folder: Path, task: str) -> Callable[[Item], Any]:
    """What transformers' own class gives for one item, in the shape of the task's results."""
    reading = READINGS[task]()
    model = getattr(transformers, reading.head).from_pretrained(folder).eval()
    typed = getattr(model.config, "type_vocab_size", 0) > 1

    @torch.inference_mode()
    def alone(item: Item) -> Any:
        count = len(item.tokens)
        given = {"input_ids": torch.tensor([item.tokens])}
        given["attention_mask"] = torch.ones(1, count, dtype=torch.long)
        if typed:
            types = [0] * (count - item.second) + [1] * item.second
            given["token_type_ids"] = torch.tensor([types])
        found = model(**given)
        if task == "classify":
            return found.logits[0].numpy()
        if task == "answer":
            return torch.stack((found.start_logits[0], found.end_logits[0]), -1).numpy()
        if task == "embed":
            return _pooled(item, found.last_hidden_state[0])
        return [_filled(item, found.logits[0, place]) for place in item.ask.places]

    return alone


def _pooled(item: Item, hidden: torch.Tensor) -> Any:
    ask: Pool = item.ask
    vector = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[ask.pooling]
    return (vector / vector.norm() if ask.normalise else vector).numpy()


def _filled(item: Item, logits: torch.Tensor) -> Any:
    ask: Blank = item.ask
    shares = logits.softmax(-1)
    allowed = ask.targets or range(len(shares))
    order = sorted(allowed, key=lambda id: -float(shares[id]))[: len(ask.targets) or ask.top]
    return torch.tensor(order).numpy(), shares[order].numpy()
