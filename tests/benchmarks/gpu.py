"""Our kernels on a GPU: checked against their twins, then timed, in one run under four minutes.

Bandwidth is told as a share of what a large copy moves on the same device. Attention is compared
with torch's scaled_dot_product_attention and FlexAttention on keys that lie side by side, which
they need and pages do not give; sampling with a sort of the vocabulary; and the chat model decodes
with and without CUDA graphs. Without a GPU it says so.

Run: python -m tests.benchmarks.gpu
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from statistics import median

import torch
from torch import Tensor

from kernels import drawing, reference
from kernels.drawing import Rules
from kernels.reference import Shape, Span, Stretch
from kernels.within import by_torch
from pipelines import models
from pipelines.chat import Settings
from pipelines.loading import bring
from pipelines.packed import PackedModel
from pipelines.sampling import Draw, choose
from tests.benchmarks.gpu_peers import Bench, Case, against, by_sorting

SIZE = 16  # tokens of a page
WRONG = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # relative error at which a check fails


CHECKS = (
    Case(5, 1, 1000),
    Case(3, 1, 777, window=100, more=True),
    Case(2, 300, 900),
    Case(2, 130, 130, window=48, more=True),
    Case(2, 1, 500, heads=16, key_heads=16, width=192),
    Case(1, 77, 205, heads=16, key_heads=16, width=192),
    Case(3, 9, 40, heads=9, key_heads=3, width=64, value_width=64),
)
DECODES = (Case(1, 1, 8192), Case(32, 1, 2048), Case(128, 1, 2048))
PREFILLS = (Case(1, 2048, 2048), Case(1, 512, 8192))
VOCABULARY = 151_936
LIMITS = {
    "greedy": (0.0, 0.0, 1.0, 0.0),
    "temperature 1": (1.0, 0.0, 1.0, 0.0),
    "top_p 0.9": (1.0, 0.0, 0.9, 0.0),
    "top_k 20, top_p 0.95": (0.6, 20.0, 0.95, 0.0),
}


def main() -> None:
    if not torch.cuda.is_available():
        sys.stdout.write("There is no GPU here, so there is nothing to measure.\n")
        return
    bench = Bench(torch.device("cuda"))
    torch.manual_seed(0)
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n")
    bench.tell("What", "Figure", "Against")
    bench.tell("---", "---", "---")
    bench.tell("copy of 1 GiB", f"{bench.copied() / 1e9:.0f} GB/s", "read and written")
    for part in (
        check_attention,
        check_within,
        check_write,
        check_sampling,
        decode,
        inside,
        write,
        sample,
        chat,
        prefill,
    ):
        if bench.over:
            bench.tell(part.__name__, "left out", "the time was up")
        else:
            part(bench)
    sys.stdout.write(f"\n{time.perf_counter() - bench.began:.0f} s\n")
    sys.exit(1 if bench.failed else 0)


def pages_for(
    bench: Bench, case: Case, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, list[Span], Shape]:
    """Queries, pages of keys and of values, rows on scattered pages, and a shape."""
    each = -(-case.keys // SIZE)
    numbers = (torch.randperm(case.rows * each) + 1).view(case.rows, each).tolist()
    rows = [
        Span(row * case.queries, case.queries, case.keys, numbers[row]) for row in range(case.rows)
    ]
    count = case.rows * each + 1

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=bench.device).to(dtype)

    key = random(count, SIZE, case.key_heads, case.width)
    value = random(count, SIZE, case.key_heads, case.value_width)
    query = random(case.rows * case.queries, case.heads, case.width)
    sinks = torch.randn(case.heads, device=bench.device) if case.more else None
    shape = Shape(case.width**-0.5, case.window, 30.0 if case.more else None, sinks)
    return query, key, value, rows, shape


def check_attention(bench: Bench) -> None:
    from kernels.paged_attention import Reader

    for dtype, limit in WRONG.items():
        for case in CHECKS:
            query, key, value, rows, shape = pages_for(bench, case, dtype)
            found = Reader.of(rows, SIZE, bench.device).attend(query, key, value, shape).float()
            exact = (query.float(), key.float(), value.float())
            wanted = reference.attend(*exact, rows, shape)
            error = ((found - wanted).norm() / wanted.norm()).item()
            bench.check(f"attention {dtype}, {told(case)}", error, limit)


def told(case: Case) -> str:
    """A case in words."""
    words = f"{case.rows} x {case.queries} of {case.keys} keys, {case.heads}/{case.key_heads} heads"
    words += f" of {case.width}"
    words += f", window {case.window}" if case.window else ""
    return words + (", softcap, sinks" if case.more else "")


def packed(
    bench: Bench, lengths: list[int], dtype: torch.dtype, heads: int, width: int
) -> tuple[Tensor, Tensor, Tensor, list[Stretch]]:
    """Queries, keys and values of rows side by side, as an encoder's joined product gives them."""
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    rows = [Stretch(start, length) for start, length in zip(starts, lengths, strict=True)]
    joined = torch.randn(sum(lengths), 3 * heads, width, device=bench.device).to(dtype)
    query, key, value = joined.chunk(3, 1)
    return query, key, value, rows


def lengths(count: int) -> list[int]:
    """Of texts: most are short."""
    chance = random.Random(0)
    return [min(max(int(chance.lognormvariate(3.7, 0.9)), 4), 512) for _ in range(count)]


def check_within(bench: Bench) -> None:
    from kernels.varlen import Rows

    for dtype, limit in WRONG.items():
        for causal, width in ((False, 32), (False, 64), (True, 128)):
            query, key, value, rows = packed(bench, [1, *lengths(9), 300], dtype, 12, width)
            if causal:
                rows[5:] = [Stretch(row.start, row.count, (0, 70)) for row in rows[5:]]
                key, value = key[:, :3], value[:, :3]  # four heads share one
            shape = Shape(width**-0.5, 50 if causal else None, 30.0 if causal else None)
            found = Rows(rows, bench.device, causal).attend(query, key, value, shape).float()
            exact = (query.float(), key.float(), value.float())
            wanted = reference.attend_within(*exact, rows, shape, causal)
            error = ((found - wanted).norm() / wanted.norm()).item()
            words = "causal, prefixes, window, softcap" if causal else "seeing all"
            bench.check(f"inside rows {dtype}, heads of {width}, {words}", error, limit)


def inside(bench: Bench) -> None:
    from kernels.varlen import Rows

    for count, heads, width in ((256, 12, 32), (256, 12, 64), (1024, 16, 64)):
        query, key, value, rows = packed(bench, lengths(count), torch.bfloat16, heads, width)
        own, shape = Rows(rows, bench.device, False), Shape(width**-0.5)
        ours = bench.seconds(own.attend, query, key, value, shape)
        each = bench.seconds(by_torch, query, key, value, rows, shape, False)
        work = sum(4 * row.count**2 for row in rows) * heads * width
        name = f"inside {count} rows, {len(query):,} tokens, {heads} heads of {width}"
        figure = f"{ours * 1e6:.0f} us, {work / ours / 1e12:.1f} TFLOP/s"
        bench.tell(name, figure, f"scaled_dot_product_attention by row {each * 1e6:.0f} us")


def written(bench: Bench, tokens: int) -> Iterator[Tensor]:
    """Pages of keys and values, keys and values, and their slots."""
    for _ in range(2):
        yield torch.zeros(2 * tokens // SIZE + 1, SIZE, 8, 128, device=bench.device).bfloat16()
    for _ in range(2):
        yield torch.randn(8, tokens, 128, device=bench.device).bfloat16().transpose(0, 1)
    yield torch.randperm(2 * tokens, device=bench.device)[:tokens].int() + SIZE


def check_write(bench: Bench) -> None:
    from kernels import pages

    key_pages, value_pages, key, value, slots = written(bench, 1000)
    wanted = key_pages.clone(), value_pages.clone()
    reference.write(*wanted, key, value, slots.long(), slots[:0].long())
    pages.write(key_pages, value_pages, key, value, slots)
    same = torch.equal(key_pages, wanted[0]) and torch.equal(value_pages, wanted[1])
    bench.check("write of 1,000 tokens", 0.0 if same else 1.0, 0.0)


def logits(bench: Bench, rows: int) -> Tensor:
    """As peaked as those of a chat model."""
    made = torch.randn(rows, VOCABULARY, device=bench.device) * 3
    tokens = torch.randint(VOCABULARY, (rows, 30), device=bench.device)
    peaks = 21 - torch.arange(30, device=bench.device) * 0.4
    return made.scatter(1, tokens, peaks.expand(rows, -1)).bfloat16()


def rules(bench: Bench, limits: tuple[float, float, float, float], rows: int) -> Rules:
    return Rules.of([(row * 77_777, row + 5) for row in range(rows)], [limits] * rows, bench.device)


def check_sampling(bench: Bench) -> None:
    from kernels import sampling

    for name, limits in LIMITS.items():
        scores, own = logits(bench, 256), rules(bench, limits, 256)
        wrong = (sampling.draw(scores, own) != drawing.draw(scores, own)).float().mean().item()
        bench.check(f"sampling of 256 rows, {name}", wrong, 0.01)  # near-ties may flip


def decode(bench: Bench) -> None:
    from kernels.paged_attention import Reader

    for case in DECODES:
        query, key, value, rows, shape = pages_for(bench, case, torch.bfloat16)
        reader = Reader.of(rows, SIZE, bench.device)
        ours = bench.seconds(reader.attend, query, key, value, shape)
        moved = case.rows * case.keys * case.key_heads * (case.width + case.value_width) * 2
        share = moved / ours / bench.copied()
        figure = f"{ours * 1e6:.0f} us, {share:.0%} of the copy's bandwidth"
        bench.tell(f"decode, {told(case)}", figure, against(bench, case))


def prefill(bench: Bench) -> None:
    """Last, because FlexAttention is compiled anew for each."""
    from kernels.paged_attention import Reader

    for case in PREFILLS:
        query, key, value, rows, shape = pages_for(bench, case, torch.bfloat16)
        reader = Reader.of(rows, SIZE, bench.device)
        ours = bench.seconds(reader.attend, query, key, value, shape)
        pairs = case.rows * case.queries * (case.keys - (case.queries - 1) / 2)
        rate = pairs * case.heads * (case.width + case.value_width) * 2 / ours
        figure = f"{ours * 1e6:.0f} us, {rate / 1e12:.0f} TFLOP/s"
        bench.tell(f"prefill, {told(case)}", figure, against(bench, case))


def write(bench: Bench) -> None:
    from kernels import pages

    for tokens in (128, 16384):
        key_pages, value_pages, key, value, slots = written(bench, tokens)
        ours = bench.seconds(pages.write, key_pages, value_pages, key, value, slots)
        own = (key_pages, value_pages, key, value, slots.long(), slots[:0].long())
        torchs = bench.seconds(reference.write, *own)
        share = 2 * (key.nbytes + value.nbytes) / ours / bench.copied()
        figure = f"{ours * 1e6:.0f} us, {share:.0%} of the copy's bandwidth"
        bench.tell(f"write of {tokens:,} tokens", figure, f"index_copy {torchs * 1e6:.0f} us")


def sample(bench: Bench) -> None:
    from kernels import sampling

    scores = logits(bench, 32)
    for name, limits in LIMITS.items():
        own = rules(bench, limits, 32)
        ours = bench.seconds(sampling.draw, scores, own)
        twin = bench.seconds(drawing.draw, scores, own)
        other = bench.seconds(by_sorting, scores, *limits)
        words = f"sort and multinomial {other * 1e6:.0f} us, its twin {twin * 1e6:.0f} us"
        bench.tell(f"sampling, 32 x {VOCABULARY:,}, {name}", f"{ours * 1e6:.0f} us", words)


def chat(bench: Bench) -> None:
    """Tokens a second of the chat model's decoding, sampling and host included."""

    found = models.find(None, "chat", lambda fraction, text: None)
    body = bring(found.folder, bench.device, torch.bfloat16, SIZE).body
    if not isinstance(body, PackedModel):
        bench.tell("chat model", "left out", "it cannot be packed")
        return
    each, steps = 16, 64
    body.make_pages(32 * each)
    decoder = body.decoder
    for rows in (1, 8, 32):
        body.decoder = decoder
        with_graphs = rate(body, rows, each, steps)
        body.decoder = None
        without = rate(body, rows, each, steps)
        figure = f"{with_graphs:.0f} tokens/s"
        bench.tell(f"{found.name}, {rows} rows", figure, f"without graphs {without:.0f} tokens/s")


@torch.inference_mode()
def rate(body: PackedModel, rows: int, each: int, steps: int) -> float:
    """Greedy tokens a second of rows with 128 tokens and more, the median of its steps."""
    pages = [range(1 + row * each, 1 + (row + 1) * each) for row in range(rows)]
    own = Settings(1, 0.0, 1.0, 0, 1.0, 0, ())
    spans = [Span(128 * row, 128, 128, pages[row]) for row in range(rows)]
    last = [span.start + 127 for span in spans]
    tokens = choose(body.forward([5] * 128 * rows, spans, last), [Draw(own, 0, ())] * rows)
    took = []
    for step in range(1, steps):
        began = time.perf_counter()
        spans = [Span(row, 1, 128 + step, pages[row]) for row in range(rows)]
        logits = body.forward([token or 0 for token in tokens], spans, range(rows))
        tokens = choose(logits, [Draw(own, step, ())] * rows)  # waits for the device
        took.append(time.perf_counter() - began)
    return rows / median(took)


if __name__ == "__main__":
    main()
