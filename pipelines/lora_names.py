"""Names of a model's layers in the words of other programs: Kohya's scripts, old versions of
diffusers, and the code that Stable Diffusion and Flux were published with.

It knows names only, neither files nor tensors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

Index: TypeAlias = "dict[str, tuple[str, ...]]"  # layers that stand for one, which was cut up

_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(\w+?)\.(\d+)\.(.+)")
_MIDDLE = re.compile(r"mid_block\.(\w+?)\.(\d+)\.(.+)")
_RESNET: Mapping[str, str] = {
    "conv1": "in_layers_2",
    "time_emb_proj": "emb_layers_1",
    "conv2": "out_layers_3",
    "conv_shortcut": "skip_connection",
}
_AROUND: Mapping[str, str] = {  # the blocks of a UNet
    "conv_in": "input_blocks_0_0",
    "conv_out": "out_2",
    "time_embedding.linear_1": "time_embed_0",
    "time_embedding.linear_2": "time_embed_2",
    "add_embedding.linear_1": "label_emb_0_0",
    "add_embedding.linear_2": "label_emb_0_2",
}
_ATTENTION: Mapping[str, str] = {  # of text encoders, as diffusers once called it
    "q_proj": "to_q",
    "k_proj": "to_k",
    "v_proj": "to_v",
    "out_proj": "to_out",
}
_FLUX: Mapping[str, str] = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in_in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in_out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in_in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in_out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in_in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in_out_layer": "time_text_embed.guidance_embedder.linear_2",
    "final_layer_linear": "proj_out",
}
_DOUBLE: Mapping[str, tuple[str, ...]] = {
    "img_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn_proj": ("attn.to_out.0",),
    "txt_attn_proj": ("attn.to_add_out",),
    "img_mlp_0": ("ff.net.0.proj",),
    "img_mlp_2": ("ff.net.2",),
    "txt_mlp_0": ("ff_context.net.0.proj",),
    "txt_mlp_2": ("ff_context.net.2",),
    "img_mod_lin": ("norm1.linear",),
    "txt_mod_lin": ("norm1_context.linear",),
}
_SINGLE: Mapping[str, tuple[str, ...]] = {
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation_lin": ("norm.linear",),
}


def flat(name: str) -> str:
    """As Kohya's scripts write it, which also is what all other words are compared by."""
    return name.replace(".", "_")


def denoiser(names: Collection[str]) -> Index:
    """Flat names, and those of others, of a UNet's or a transformer's layers."""
    found = {flat(name): (name,) for name in names}
    found |= {  # attention, as diffusers once called it
        flat(name.removesuffix(".0")): (name,) for name in names if name.endswith(".to_out.0")
    }
    found |= {other: (name,) for name, other in _unet(names)}
    return found | dict(_flux(set(names)))


def text_encoder(names: Collection[str]) -> Index:
    """The same of a text encoder, whose outermost module not all versions of it name."""
    found: Index = {}
    for name in names:
        parent, dot, last = name.rpartition(".")
        for each in (name, parent + dot + _ATTENTION.get(last, last)):
            inner = each.removeprefix("text_model.")
            found[flat(inner)] = found[flat(f"text_model.{inner}")] = (name,)
    return found


def _unet(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Layers of a UNet with their names in the code that Stable Diffusion was published with, where
    blocks are counted through.
    """
    blocks = [match for name in names if (match := _BLOCK.fullmatch(name))]
    parts = {match.group(1, 2, 3, 4) for match in blocks}
    sizes = Counter((side, int(block)) for side, block, kind, _ in parts if kind == "resnets")
    attends = {(side, int(block)) for side, block, kind, _ in parts if kind == "attentions"}
    for match in blocks:
        side, block, kind, place, rest = match.groups()
        here = side, int(block)
        before = sum(n for (other, at), n in sizes.items() if other == side and at < here[1])
        if side == "down":
            at = 1 + before + here[1]
            at += sizes[here] if kind == "downsamplers" else int(place)
            yield (
                match.string,
                f"input_blocks_{at}_{int(kind == 'attentions')}_{_inner(kind, rest)}",
            )
        else:
            at = before + (sizes[here] - 1 if kind == "upsamplers" else int(place))
            slot = {"attentions": 1, "upsamplers": 1 + (here in attends)}.get(kind, 0)
            yield match.string, f"output_blocks_{at}_{slot}_{_inner(kind, rest)}"
    for name in names:
        if middle := _MIDDLE.fullmatch(name):
            kind, place, rest = middle.groups()
            slot = 1 if kind == "attentions" else 2 * int(place)
            yield name, f"middle_block_{slot}_{_inner(kind, rest)}"
        if name in _AROUND:
            yield name, _AROUND[name]


def _inner(kind: str, rest: str) -> str:
    if kind == "downsamplers":
        return "op"
    return _RESNET.get(rest, flat(rest)) if kind == "resnets" else flat(rest)


def _flux(names: Collection[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The same for Flux, where one layer stood for several."""
    double = sorted({n.split(".")[1] for n in names if n.startswith("transformer_blocks.")})
    single = sorted({n.split(".")[1] for n in names if n.startswith("single_transformer_blocks.")})
    if not single:
        return
    for other, name in _FLUX.items():
        yield other, (name,)
    for block in double:
        for other, inner in _DOUBLE.items():
            parts = tuple(f"transformer_blocks.{block}.{each}" for each in inner)
            yield f"double_blocks_{block}_{other}", parts
    for block in single:
        for other, inner in _SINGLE.items():
            parts = tuple(f"single_transformer_blocks.{block}.{each}" for each in inner)
            yield f"single_blocks_{block}_{other}", parts
