"""Low-rank adapters: every row of a call has its own, from files in all usual formats, and equals a
model whose weights were changed for good; what does not fit is refused, and nothing stays behind.

Mostly in double precision: the smallest models enlarge roundings a hundredfold.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lora_files as files
import pytest
import torch
from diffusers import FluxTransformer2DModel, PixArtTransformer2DModel, UNet2DConditionModel
from lora_files import Changes, drawn, kohya, merged, peft, processors, saved
from tiny_image import lively, unet
from torch import Tensor, nn
from transformers import CLIPTextConfig
from transformers.models.clip.modeling_clip import CLIPTextModel, CLIPTextModelWithProjection

from pipelines.fetch import Unprepared
from pipelines.lora import Adapters
from pipelines.lora_files import available, named
from queueing.work import Invalid

pytestmark = pytest.mark.usefixtures("one_thread")

randn = partial(torch.randn, dtype=torch.float64)
Forward = Callable[[nn.Module, slice], Tensor]
ATTENTION = ".to_q", ".to_k", ".to_v", ".to_out.0"
MIXED = [("first", 1.0), ("first", 0.5), None, ("second", 1.0), ("second", -0.7), ("first", 1.0)]
ROWS = len(MIXED)
WIDE = {**unet().config, "block_out_channels": (16, 32), "norm_num_groups": 4}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


@pytest.fixture
def model() -> nn.Module:
    return lively(unet()).double()


def clips() -> tuple[nn.Module, nn.Module]:
    config = CLIPTextConfig(
        vocab_size=100, hidden_size=32, intermediate_size=37, num_attention_heads=4,
        num_hidden_layers=2, projection_dim=32, max_position_embeddings=16,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return lively(CLIPTextModel(config)), lively(CLIPTextModelWithProjection(config))


def flux() -> nn.Module:
    return lively(
        FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8), guidance_embeds=True,
        )
    ).double()  # fmt: skip


def pixart() -> nn.Module:
    return lively(
        PixArtTransformer2DModel(
            sample_size=8, num_layers=1, patch_size=2, attention_head_dim=8, num_attention_heads=2,
            caption_channels=32, in_channels=4, cross_attention_dim=16, out_channels=8,
        )
    ).double()  # fmt: skip


def call_unet(dtype: torch.dtype = torch.float64) -> Forward:
    """A call with rows of their own in everything."""
    latents, words = randn(ROWS, 4, 16, 16).to(dtype), randn(ROWS, 5, 64).to(dtype)
    times, vectors = torch.arange(ROWS) * 37.0, randn(ROWS, 32).to(dtype)

    def call(model: nn.Module, rows: slice) -> Tensor:
        added = {"text_embeds": vectors[rows], "time_ids": torch.ones(ROWS, 6)[rows]}
        found: Tensor = model(
            latents[rows], times[rows], words[rows], added_cond_kwargs=added
        ).sample
        return found

    return call


def call_flux() -> Forward:
    latents, words = randn(ROWS, 16, 4), randn(ROWS, 5, 32)
    times, vectors = torch.linspace(0.1, 1, ROWS), randn(ROWS, 32)

    def call(model: nn.Module, rows: slice) -> Tensor:
        found: Tensor = model(
            latents[rows],
            encoder_hidden_states=words[rows],
            pooled_projections=vectors[rows],
            timestep=times[rows],
            guidance=times[rows],
            img_ids=torch.zeros(16, 3),
            txt_ids=torch.zeros(5, 3),
        ).sample
        return found

    return call


def call_pixart() -> Forward:
    latents, words = randn(ROWS, 4, 8, 8), randn(ROWS, 5, 32)

    def call(model: nn.Module, rows: slice) -> Tensor:
        found: Tensor = model(
            latents[rows],
            encoder_hidden_states=words[rows],
            timestep=torch.arange(ROWS)[rows] * 37.0,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ).sample
        return found

    return call


@torch.inference_mode()
def assert_same_rows(
    model: nn.Module,
    call: Forward,
    adapters: Adapters,
    changes: dict[str, Changes],
    mix: Sequence[tuple[str, float] | None] = MIXED,
    near: float = 1e-9,  # of the largest number
) -> None:
    """Each row of a mixed call is what it is on a model changed for good, and alone."""
    rows = slice(len(mix))
    bare = call(model, rows)
    with adapters.rows(mix):
        found = call(model, rows)
    scale = bare.abs().max().item()
    for place, entry in enumerate(mix):
        row = slice(place, place + 1)
        with adapters.rows([entry]):
            alone = call(model, row)
        truth = merged(model, changes[entry[0]], entry[1]) if entry else model
        wanted = call(truth, row)
        close(found[row], wanted, near)
        close(found[row], alone, near)
        if entry is not None:
            assert (found[row] - bare[row]).abs().max() > 0.01 * scale
    assert torch.equal(call(model, rows), bare)


def close(found: Tensor, wanted: Tensor, near: float) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=near * wanted.abs().max().item())


def loaded(model: nn.Module, folder: Path, **parts: dict[str, Tensor]) -> Adapters:
    adapters = Adapters(model)
    for name, tensors in parts.items():
        adapters.load(name, saved(folder / f"{name}.safetensors", tensors))
    return adapters


def test_every_row_of_a_call_has_its_own_adapter_and_weight(
    model: nn.Module, tmp_path: Path
) -> None:
    first = drawn(model, 1, rank=4, alpha=2.0)  # all layers, convolutions with them
    second = drawn(model, 2, *ATTENTION)
    adapters = loaded(model, tmp_path, first=kohya(first), second=peft(second))
    assert adapters.names == ("first", "second")
    assert_same_rows(model, call_unet(), adapters, {"first": first, "second": second})


def test_single_precision_is_as_near_as_it_can_be(tmp_path: Path) -> None:
    model = lively(UNet2DConditionModel.from_config(WIDE))
    first, second = drawn(model, 1, rank=4, alpha=1.0), drawn(model, 2, *ATTENTION, alpha=0.5)
    adapters = loaded(model, tmp_path, first=peft(first), second=peft(second))
    assert_same_rows(
        model, call_unet(torch.float32), adapters, {"first": first, "second": second}, near=1e-5
    )


FORMATS: dict[str, Callable[[Changes], dict[str, Tensor]]] = {
    "peft": peft,
    "peft with an adapter's name": lambda c: {
        key.replace(".weight", ".default.weight"): each
        for key, each in peft(c, "base_model.model.").items()
    },
    "diffusers": lambda c: {
        key.replace("lora_A", "lora.down").replace("lora_B", "lora.up"): each
        for key, each in peft(c).items()
    },
    "diffusers with lora_down": lambda c: {
        key.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): each
        for key, each in peft(c).items()
    },
    "attention processors": processors,
    "attention processors without a prefix": lambda c: processors(c, ""),
    "kohya": kohya,
}


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_means_the_same_in_every_format(
    format: str, model: nn.Module, tmp_path: Path
) -> None:
    first, second = drawn(model, 1, *ATTENTION, alpha=1.0), drawn(model, 2, *ATTENTION, rank=3)
    write = FORMATS[format]
    adapters = loaded(model, tmp_path, first=write(first), second=write(second))
    assert_same_rows(model, call_unet(), adapters, {"first": first, "second": second}, MIXED[1:4])


def test_alphas_are_read_from_what_a_file_says_of_itself(model: nn.Module, tmp_path: Path) -> None:
    first = drawn(model, 1, *ATTENTION, rank=4, alpha=2.0)
    name = next(iter(first))
    first[name] = files.Change(first[name].down, first[name].up, 8.0)
    said = {"unet.r": 4, "unet.lora_alpha": 2, "unet.alpha_pattern": {name: 8}}
    adapters = Adapters(model)
    path = saved(tmp_path / "a.safetensors", peft(first, said=True), said=said)
    adapters.load("first", path)
    assert_same_rows(model, call_unet(), adapters, {"first": first}, MIXED[:3])


SGM = {  # a few layers, as SDXL's own code calls them
    "conv_in": "input_blocks_0_0",
    "time_embedding.linear_2": "time_embed_2",
    "add_embedding.linear_1": "label_emb_0_0",
    "down_blocks.0.resnets.0.conv1": "input_blocks_1_0_in_layers_2",
    "down_blocks.0.downsamplers.0.conv": "input_blocks_2_0_op",
    "down_blocks.1.resnets.0.time_emb_proj": "input_blocks_3_0_emb_layers_1",
    "down_blocks.1.resnets.0.conv_shortcut": "input_blocks_3_0_skip_connection",
    "down_blocks.1.attentions.0.proj_in": "input_blocks_3_1_proj_in",
    "down_blocks.1.attentions.0.transformer_blocks.1.attn2.to_out.0": (
        "input_blocks_3_1_transformer_blocks_1_attn2_to_out_0"
    ),
    "mid_block.resnets.1.conv2": "middle_block_2_out_layers_3",
    "mid_block.attentions.0.proj_out": "middle_block_1_proj_out",
    "up_blocks.0.attentions.1.proj_in": "output_blocks_1_1_proj_in",
    "up_blocks.0.upsamplers.0.conv": "output_blocks_1_2_conv",
    "up_blocks.1.resnets.1.conv1": "output_blocks_3_0_in_layers_2",
    "conv_out": "out_2",
}


def test_layers_go_by_their_names_in_the_code_of_sdxl(model: nn.Module, tmp_path: Path) -> None:
    first = {name: change for name, change in drawn(model, 1).items() if name in SGM}
    assert len(first) == len(SGM)
    adapters = loaded(model, tmp_path, first=kohya(first, names=SGM))
    assert_same_rows(model, call_unet(), adapters, {"first": first}, MIXED[:3])


def test_a_linear_layer_takes_what_was_made_for_a_convolution_of_one_pixel(
    model: nn.Module, tmp_path: Path
) -> None:
    first = drawn(model, 1, ".proj_in", ".proj_out")
    tensors = {
        key: each[..., None, None] if each.dim() == 2 else each
        for key, each in kohya(first).items()
    }
    adapters = loaded(model, tmp_path, first=tensors)
    assert_same_rows(model, call_unet(), adapters, {"first": first}, MIXED[:3])


@pytest.mark.parametrize("make, call", [(pixart, call_pixart), (flux, call_flux)])
def test_transformers_have_adapters_too(
    make: Callable[[], nn.Module], call: Callable[[], Forward], tmp_path: Path
) -> None:
    model = make()
    first = drawn(model, 1, *ATTENTION, "proj", "linear_1", "linear", alpha=1.0)
    second = drawn(model, 2, *ATTENTION)
    adapters = loaded(
        model,
        tmp_path,
        first=peft(first, "transformer."),
        second=kohya(second, "lora_transformer_"),
    )
    assert_same_rows(model, call(), adapters, {"first": first, "second": second})


FUSED = {
    "double_blocks_0_img_attn_qkv": [f"transformer_blocks.0.attn.to_{x}" for x in "qkv"],
    "double_blocks_0_txt_attn_qkv": [f"transformer_blocks.0.attn.add_{x}_proj" for x in "qkv"],
    "double_blocks_0_txt_mlp_0": ["transformer_blocks.0.ff_context.net.0.proj"],
    "single_blocks_0_linear1": [
        *(f"single_transformer_blocks.0.attn.to_{x}" for x in "qkv"),
        "single_transformer_blocks.0.proj_mlp",
    ],
    "single_blocks_0_linear2": ["single_transformer_blocks.0.proj_out"],
    "vector_in_in_layer": ["time_text_embed.text_embedder.linear_1"],
}


@pytest.mark.parametrize("prefix", ["lora_unet_", "diffusion_model."])
def test_layers_of_flux_that_were_one_are_changed_together(prefix: str, tmp_path: Path) -> None:
    model = flux()
    first: Changes = {}
    tensors: dict[str, Tensor] = {}
    for other, names in FUSED.items():
        parts = [drawn(model, 1, name)[name] for name in names]
        down, up = parts[0].down, torch.cat([part.up for part in parts])
        first |= {n: files.Change(down, p.up, 1.0) for n, p in zip(names, parts, strict=True)}
        key = other if prefix.endswith("_") else other.replace("blocks_0_", "blocks.0.")
        tensors |= kohya({key: files.Change(down, up, 1.0)}, prefix, {key: key})
    adapters = loaded(model, tmp_path, first=tensors)
    assert_same_rows(model, call_flux(), adapters, {"first": first}, MIXED[:3])


@torch.inference_mode()
def test_a_weight_of_zero_is_none_to_the_bit(model: nn.Module, tmp_path: Path) -> None:
    call, adapters = call_unet(), loaded(model, tmp_path, first=kohya(drawn(model, 1)))
    bare = call(model, slice(None))
    with adapters.rows([("first", 0.0), None, ("first", -0.0), *[None] * 3]):
        assert torch.equal(call(model, slice(None)), bare)
    with adapters.rows([("first", 0.0), ("first", 1.0), None, *[("first", 1.0)] * 3]):
        found = call(model, slice(None))
    assert torch.equal(found[[0, 2]], bare[[0, 2]])
    assert not torch.equal(found[1], bare[1])


@torch.inference_mode()
def test_in_exact_mode_the_bits_of_a_row_do_not_depend_on_who_else_rides(
    model: nn.Module, tmp_path: Path
) -> None:
    call, adapters = call_unet(), Adapters(model, exact=True)
    adapters.load("first", saved(tmp_path / "first.safetensors", kohya(drawn(model, 1))))
    found = []
    for neighbour in (None, ("first", 1.0), ("first", 0.3)):
        with adapters.rows([("first", 1.0), *[neighbour] * (ROWS - 1)]):
            found.append(call(model, slice(None))[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@torch.inference_mode()
def test_a_call_that_fails_leaves_nothing_behind(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, adapters = call_unet(), loaded(model, tmp_path, first=kohya(drawn(model, 1)))
    bare = call(model, slice(None))

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(model.up_blocks[0], "forward", fail)
        with pytest.raises(RuntimeError, match="no memory"), adapters.rows(MIXED[:1] * ROWS):
            call(model, slice(None))
    assert torch.equal(call(model, slice(None)), bare)
    with pytest.raises(Invalid), adapters.rows([("first", 1.0), ("unknown", 1.0)]):
        call(model, slice(0, 2))
    assert torch.equal(call(model, slice(None)), bare)


def test_a_call_with_other_rows_than_were_named_is_a_bug(model: nn.Module, tmp_path: Path) -> None:
    call, adapters = call_unet(), loaded(model, tmp_path, first=kohya(drawn(model, 1)))
    with pytest.raises(RuntimeError, match=r" has 6 rows .* for 2\. This is a bug"):
        with adapters.rows([("first", 1.0), None]):
            call(model, slice(None))


@pytest.mark.parametrize(
    "adapter, words",
    [
        (("third", 1.0), "adapter is 'third'; there are: first"),
        (("first", float("nan")), "The weight of adapter first is nan; give a finite number"),
    ],
)
def test_what_is_not_there_is_refused(
    adapter: tuple[str, float], words: str, model: nn.Module, tmp_path: Path
) -> None:
    adapters = loaded(model, tmp_path, first=kohya(drawn(model, 1, *ATTENTION)))
    with pytest.raises(Invalid, match=words), adapters.rows([adapter]):
        pass


def test_the_memory_of_adapters_is_counted_and_given_back(model: nn.Module, tmp_path: Path) -> None:
    call, first = call_unet(), drawn(model, 1, *ATTENTION)
    bare = call(model, slice(None))
    adapters = loaded(model, tmp_path, first=peft(first), again=peft(first))
    own = sum(each.down.nbytes + each.up.nbytes for each in first.values())
    assert adapters.bytes == 2 * 2 * own  # two adapters, in double precision
    with pytest.raises(Unprepared, match="There is an adapter first already"):
        adapters.load("first", tmp_path / "first.safetensors")
    adapters.close()
    assert adapters.bytes == 0
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(call(model, slice(None)), bare)


TO_Q = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "dora": (lambda t: t | {f"unet.{TO_Q}.lora_magnitude_vector": torch.ones(4)}, "That is DoRA"),
    "dora of others": (lambda t: t | {f"unet.{TO_Q}.dora_scale": torch.ones(4)}, "That is DoRA"),
    "loha": (lambda t: {f"unet.{TO_Q}.hada_w1_a": torch.ones(4, 2)}, "That is LoHa"),
    "lokr": (lambda t: {f"unet.{TO_Q}.lokr_w1": torch.ones(4, 2)}, "That is LoKr"),
    "tucker": (lambda t: t | {f"unet.{TO_Q}.lora_mid.weight": torch.ones(4)}, "Tucker"),
    "a difference": (lambda t: t | {"unet.conv_in.diff": torch.ones(4)}, r"unet\.conv_in\.diff"),
    "a bias": (lambda t: t | {f"unet.{TO_Q}.lora_B.bias": torch.ones(4)}, r"lora_B\.bias"),
    "another layer": (
        lambda t: {"unet.nowhere.lora_A.weight": torch.ones(2, 4)},
        r"has unet\.nowhere\.lora_A\.weight, which fits no layer of UNet2DConditionModel",
    ),
    "another text encoder": (
        lambda t: {"text_encoder.a.lora_A.weight": torch.ones(2, 4)},
        r"has text_encoder\.a\.lora_A\.weight, which fits no layer of a text encoder",
    ),
    "a half": (lambda t: files.only(t, ["lora_A"]), "no up beside it"),
    "other sizes": (
        lambda t: {key: torch.ones(3, 3) for key in t},
        rf"has unet\.{TO_Q}.* of \[3, 3\].* do not fit",
    ),
    "an up of another rank": (
        lambda t: {k: each if "lora_A" in k else each[:, :1] for k, each in t.items()},
        "do not fit",
    ),
    "a number alone": (lambda t: {key: torch.tensor(1.0) for key in t}, "do not fit"),
    "twice": (
        lambda t: t | {k.replace("lora_A", "lora_down"): e.clone() for k, e in t.items()},
        "which mean the same",
    ),
    "no numbers": (lambda t: {key: each * torch.nan for key, each in t.items()}, "not finite"),
    "many alphas": (lambda t: t | {f"unet.{TO_Q}.alpha": torch.ones(2)}, "of 2 numbers"),
    "nothing": (lambda t: {}, "is empty"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_does_not_fit_is_refused_whole(
    what: str, model: nn.Module, tmp_path: Path
) -> None:
    spoil, words = BROKEN[what]
    good = peft(drawn(model, 1, TO_Q))
    path = saved(tmp_path / "shared.safetensors", spoil(dict(good)))
    adapters = Adapters(model)
    with pytest.raises(Unprepared, match=rf"(?s)^shared\.safetensors .*{words}"):
        adapters.load("first", path)
    assert adapters.names == ()
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("content", [b"", b"nonsense, and more of it", b"\x08" + bytes(7) + b"{}"])
def test_a_file_that_is_no_safetensors_is_refused(
    content: bytes, model: nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(Unprepared, match=r"bad\.safetensors .*fetch it again|is empty"):
        Adapters(model).load("bad", path)
    with pytest.raises(Unprepared, match=r"gone\.safetensors cannot be read"):
        Adapters(model).load("gone", tmp_path / "gone.safetensors")


def test_other_kinds_of_peft_are_refused_by_what_a_file_says(
    model: nn.Module, tmp_path: Path
) -> None:
    path = saved(tmp_path / "a.safetensors", peft(drawn(model, 1)), said={"unet.use_rslora": True})
    with pytest.raises(Unprepared, match=r"made with unet\.use_rslora"):
        Adapters(model).load("a", path)


def read(encoder: nn.Module, rows: slice = slice(None)) -> Tensor:
    tokens = torch.arange(ROWS * 16).reshape(ROWS, 16) % 97 + 2
    tokens[:, -1] = 1
    found = encoder(tokens[rows], output_hidden_states=True)
    return torch.cat([found.hidden_states[-1].flatten(1), found[0].flatten(1)], dim=1)


TEXT = "q_proj", "k_proj", "v_proj", "out_proj"
TEXT_FORMATS: dict[str, Callable[[Changes, Changes], list[dict[str, Tensor]]]] = {
    "peft": lambda a, b: [peft(a, "text_encoder.text_model."), peft(b, "text_encoder_2.")],
    "diffusers": lambda a, b: [
        files.linears(a, "text_encoder.text_model."),
        files.linears(b, "text_encoder_2."),
    ],
    "kohya": lambda a, b: [kohya(a, "lora_te1_text_model_"), kohya(b, "lora_te2_")],
    "kohya for one": lambda a, b: [kohya(a, "lora_te_text_model_"), kohya(b, "lora_te2_")],
}


@pytest.mark.parametrize("format", TEXT_FORMATS)
@torch.inference_mode()
def test_text_encoders_have_their_part_when_they_read(
    format: str, model: nn.Module, tmp_path: Path
) -> None:
    encoders = clips()
    changes = [drawn(each, seed, *TEXT) for seed, each in enumerate(encoders)]
    path = saved(tmp_path / "a.safetensors", *TEXT_FORMATS[format](*changes))
    adapters = Adapters(model, encoders)
    adapters.load("first", path)
    adapters.load("second", saved(tmp_path / "b.safetensors", peft(drawn(model, 1, TO_Q))))
    assert adapters.reading == {"first"}
    for encoder, change in zip(encoders, changes, strict=True):
        bare = read(encoder)
        with adapters.rows(mix := [("first", 1.0), None, ("first", 0.5), *[None] * 3]):
            found = read(encoder)
        for place, entry in enumerate(mix):
            row = slice(place, place + 1)
            truth = merged(encoder, change, entry[1]) if entry else encoder
            close(found[row], read(truth, row), 1e-5)
        assert not torch.allclose(found[0], bare[0], atol=0.01)
        assert torch.equal(read(encoder), bare)


@torch.inference_mode()
def test_a_text_that_cannot_be_read_leaves_no_adapter_behind(
    model: nn.Module, tmp_path: Path
) -> None:
    encoders = clips()
    changes = kohya(drawn(encoders[0], 1, *TEXT), "lora_te1_")
    adapters = Adapters(model, encoders)
    adapters.load("first", saved(tmp_path / "a.safetensors", changes))
    bare = read(encoders[0])
    for _ in range(2):
        with pytest.raises(IndexError), adapters.rows([("first", 0.5)]):
            encoders[0](torch.full((1, 16), 500))
    assert torch.equal(read(encoders[0]), bare)


def test_a_file_for_more_text_encoders_than_there_are_is_refused(
    model: nn.Module, tmp_path: Path
) -> None:
    encoders = clips()
    changes = kohya(drawn(encoders[1], 1, *TEXT), "lora_te2_")
    with pytest.raises(Unprepared, match="fits no layer of a text encoder"):
        Adapters(model, encoders[:1]).load("first", saved(tmp_path / "a.safetensors", changes))


def test_half_precision_keeps_to_its_own(tmp_path: Path) -> None:
    model = lively(unet()).to(torch.bfloat16)
    first = drawn(model, 1, *ATTENTION)
    adapters = loaded(model, tmp_path, first={k: e.half() for k, e in kohya(first).items()})
    layer = model.get_submodule(TO_Q)
    rows = torch.randn(2, 3, layer.in_features, dtype=torch.bfloat16)
    with adapters.rows([("first", 1.0), None]):
        found = layer(rows)
    assert found.dtype == torch.bfloat16
    change = first[TO_Q].whole().to(torch.bfloat16)
    torch.testing.assert_close(found[0], layer(rows)[0] + rows[0] @ change.T, rtol=0.05, atol=0.05)


def test_a_folder_has_its_adapters_by_the_names_of_their_files(tmp_path: Path) -> None:
    for name in ("b 1.0.safetensors", "a-b_c.safetensors", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "again.safetensors").symlink_to(tmp_path / "a-b_c.safetensors")
    found = available(tmp_path)
    assert list(found) == ["a-b_c", "again", "b 1.0"]
    assert found["b 1.0"] == tmp_path / "b 1.0.safetensors"
    assert named({"CARPOOL_LORA": str(tmp_path)}) == found
    assert named({"CARPOOL_LORA": ""}) == named({}) == {}


def test_what_is_no_adapter_in_a_folder_is_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "lora", tmp_path / "secret.safetensors"
    with pytest.raises(Unprepared, match="CARPOOL_LORA is .*lora, which is no folder"):
        available(inside)
    inside.mkdir()
    outside.write_bytes(b"x")
    (inside / "link.safetensors").symlink_to(outside)
    with pytest.raises(Unprepared, match=r"link\.safetensors is a link out of"):
        available(inside)
    (inside / "link.safetensors").unlink()
    (inside / "folder.safetensors").mkdir()
    with pytest.raises(Unprepared, match=r"folder\.safetensors in .* is no file"):
        available(inside)
    (inside / "folder.safetensors").rmdir()
    for name in (" a", "..", "a\nb", "a<b", "a" * 101):
        (inside / f"{name}.safetensors").write_bytes(b"x")
        with pytest.raises(Unprepared, match="cannot be an adapter's"):
            available(inside)
        (inside / f"{name}.safetensors").unlink()


def test_adapters_are_listed_where_torch_cannot_be_imported() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'diffusers']))\n"
        "from pipelines.lora_files import named\nprint(named({}))"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "{}", done.stderr
