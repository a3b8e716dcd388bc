"""Parts of a model on a host, done in fewer passes by kernels of our own: norms, gates, and whole
layers of decoders as Llama has them and of encoders as BERT and DistilBERT have them.

They are known by what they have, never by the model's name; whoever takes them checks that the
model still says the same. It does not know requests or text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention import layer_index, through
from kernels.elementwise import Rows, gated, rms_norm, rotation
from kernels.encoder import after_attention
from kernels.linear import Linear
from kernels.reference import Shape

_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}  # as Qwen 3 has them
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


class _Parts(NamedTuple):
    """Where an encoder's layer has what it consists of."""

    query: str
    key: str
    value: str
    out: str
    first: str
    up: str
    between: str
    down: str
    second: str


_ENCODERS = (
    _Parts(
        "attention.self.query", "attention.self.key", "attention.self.value",
        "attention.output.dense", "attention.output.LayerNorm", "intermediate.dense",
        "intermediate.intermediate_act_fn", "output.dense", "output.LayerNorm",
    ),
    _Parts(
        "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin",
        "sa_layer_norm", "ffn.lin1", "ffn.activation", "ffn.lin2", "output_layer_norm",
    ),
)  # fmt: skip


@torch.inference_mode()
def shorten(model: nn.Module, shapes: Mapping[int, Shape]) -> list[Any]:
    """Give parts that have one a shorter way; returns them.

    `shapes` says what each layer was seen to ask of attention.
    """
    taken: list[Any] = []
    modules: list[Any] = list(model.modules())
    for module in modules:
        forward = _way(module, shapes)
        if forward is not None:
            module.forward = forward
            taken.append(module)
    return taken


def restore(taken: list[Any]) -> None:
    """Let them go their own way again."""
    for module in taken:
        del module.forward


def _way(module: Any, shapes: Mapping[int, Shape]) -> Callable[..., Tensor] | None:
    for parts in _ENCODERS:
        if _leaves(module) == set(parts):
            return _encoder(module, parts, shapes)
    return _norm(module) or _gate(module) or _layer(module, shapes)


def _norm(module: Any) -> Rows | None:
    """Root mean square norms as Llama has them."""
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor):
        return None
    return rms_norm(weight, epsilon) if isinstance(epsilon, float) else None


def _gate(module: Any) -> Callable[..., Tensor] | None:
    """Gated layers with SiLU, as Llama has them; it may be told what to add."""
    if _children(module) != _GATED or not type(module.act_fn).__name__.startswith("SiLU"):
        return None
    linears = _linears(module, "gate_proj", "up_proj", "down_proj")
    if linears is None:
        return None
    gate, up, down = linears
    if gate.columns != up.columns:
        return None
    multiply = gated(module.gate_proj.weight, gate.columns)
    if multiply is None:
        return None
    both = gate.beside(up)
    return lambda input, more=None: down(multiply(both(input)), more)


def _layer(module: Any, shapes: Mapping[int, Shape]) -> Callable[..., Tensor] | None:
    """Attention and a gated layer, each after a norm and added to what came in."""
    attention = getattr(module, "self_attn", None)
    if _children(module) != _LAYER or _children(attention) - _HEAD_NORMS != _ATTENTION:
        return None
    shape = shapes.get(getattr(attention, "layer_idx", -1))
    first, second = _norm(module.input_layernorm), _norm(module.post_attention_layernorm)
    gate = _gate(module.mlp)
    attend = None if shape is None else _attention(attention, shape)
    if first is None or second is None or gate is None or attend is None:
        return None

    def forward(
        hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        rows = hidden_states[0]  # [tokens, width]
        rows = attend(first(rows), position_embeddings, rows)
        return gate(second(rows), rows)[None]

    return forward


def _attention(
    module: Any, shape: Shape
) -> Callable[[Tensor, tuple[Tensor, Tensor], Tensor], Tensor] | None:
    """What it adds to `rows`, from these after a norm, with its heads turned by position."""
    linears = _linears(module, *(f"{name}_proj" for name in "qkvo"))
    width, index = getattr(module, "head_dim", None), module.layer_idx
    if linears is None or not isinstance(width, int):
        return None
    query, key, value, out = linears
    rotate = rotation(module.q_proj.weight, width)
    norms = _head_norms(module)
    if rotate is None or norms is None:
        return None
    joined = query.beside(key, value)
    counts = [each.columns // width for each in (query, key, value)]

    def attend(normed: Tensor, turns: tuple[Tensor, Tensor], rows: Tensor) -> Tensor:
        heads = joined(normed).view(len(rows), -1, width)  # [tokens, heads of all three, width]
        queries, keys, values = torch.split(heads, counts, 1)
        for norm in norms:
            queries, keys = norm[0](queries), norm[1](keys)
        for turned in (queries, keys):
            rotate(turned, *turns)
        return out(through(index, queries, keys, values, shape).flatten(1), rows)

    return attend


def _head_norms(module: Any) -> list[tuple[Rows, Rows]] | None:
    """Of queries and keys: one pair or none; None where they have one that is not ours."""
    if not _children(module) & _HEAD_NORMS:
        return []
    query, key = (_norm(getattr(module, name, None)) for name in ("q_norm", "k_norm"))
    return None if query is None or key is None else [(query, key)]


def _encoder(
    module: Any, parts: _Parts, shapes: Mapping[int, Shape]
) -> Callable[..., Tensor] | None:
    """Attention, then two layers with GELU between; each is added to what came in, and normed."""
    linears = _linears(module, parts.query, parts.key, parts.value, parts.out, parts.up, parts.down)
    attention: Any = module.get_submodule(parts.query.rpartition(".")[0])
    width, index = getattr(attention, "attention_head_size", 0), layer_index(attention)
    shape = shapes.get(index)
    if linears is None or shape is None or not width or not _is_gelu(module, parts.between):
        return None
    query, key, value, out, up, down = linears
    first, second = module.get_submodule(parts.first), module.get_submodule(parts.second)
    after = after_attention(out, first, up, down, second)
    if after is None:
        return None
    joined = query.beside(key, value)
    counts = [each.columns // width for each in (query, key, value)]

    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        rows = hidden_states[0]  # [tokens, width]
        heads = joined(rows).view(len(rows), -1, width)
        queries, keys, values = torch.split(heads, counts, 1)
        return after(through(index, queries, keys, values, shape).flatten(1), rows)[None]

    return forward


def _is_gelu(module: nn.Module, name: str) -> bool:
    """The exact one; the usual approximation is off by 3e-4."""
    probe = torch.linspace(-4, 4, 101)
    return torch.allclose(module.get_submodule(name)(probe), F.gelu(probe), rtol=0, atol=1e-6)


def _leaves(module: nn.Module) -> set[str]:
    """The parts that have no parts, but those that only train."""
    return {
        name
        for name, part in module.named_modules()
        if not any(part.children()) and type(part) is not nn.Dropout
    }


def _children(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()} if module is not None else set()


def _linears(module: Any, *names: str) -> list[Linear] | None:
    """Those of these names, if `prepack` has laid out all for us."""
    found = [vars(module.get_submodule(name)).get("forward") for name in names]
    own = [forward for forward in found if isinstance(forward, Linear)]
    return own if len(own) == len(names) else None
