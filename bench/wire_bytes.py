"""Prints the table of docs/strategies.md: bytes on the wire for each published model, strategy and layout.

What all_gather and ulysses send does not depend on the layout; halo has no striped one. usp is on 4 context × 2 ulysses
ranks, the others on 8 context ranks.

May touch: nothing. `python bench/wire_bytes.py`. Tested in tests/impl/wire/test_wire_bytes.py.
"""

from impl.wire_bytes import LayerShape, wire_bytes

# (name, query heads, kv heads, head_dim, window W): the local layers of the published configurations.
MODELS = (
    ("Gemma 2 2B", 8, 4, 256, 4096),
    ("Gemma 2 9B", 16, 8, 256, 4096),
    ("Gemma 2 27B", 32, 16, 128, 4096),
    ("Gemma 3 4B", 8, 4, 256, 1024),
    ("Gemma 3 12B, Gemma 4 26B-A4B", 16, 8, 256, 1024),
    ("Gemma 3 27B", 32, 16, 128, 1024),
    ("Gemma 4 31B", 32, 16, 256, 1024),
    ("Gemma 4 E2B", 8, 1, 256, 512),
    ("Gemma 4 E4B", 8, 2, 256, 512),
    ("gpt-oss 20B / 120B", 64, 8, 64, 128),
    ("Mistral 7B v0.1", 32, 8, 128, 4096),
    ("OLMo 3 7B", 32, 32, 128, 4096),
    ("OLMo 3 32B", 40, 8, 128, 4096),
)
LAYOUTS = ("contiguous", "dual_chunk_swap", "striped")
COLUMNS = (
    *(("halo", layout) for layout in LAYOUTS[:2]),
    ("all_gather", "any layout"),
    *(("ring", layout) for layout in LAYOUTS),
    ("ulysses", "any layout"),
    *(("usp", layout) for layout in LAYOUTS),
)
TOKENS, RANKS, MIB = 131072, 8, 2**20


def table() -> str:
    """MiB that arrive at the busiest rank, "forward + backward", for one layer at batch 1 in bfloat16."""
    header = ["model (local layers)", *(f"{strategy}, {layout}" for strategy, layout in COLUMNS)]
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    for name, *sizes in MODELS:
        cells = [name, *(cell(strategy, layout, *sizes) for strategy, layout in COLUMNS)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(strategy: str, layout: str, num_query_heads: int, num_kv_heads: int, head_dim: int, size: int) -> str:
    """One cell; `size` is the window's."""
    ulysses_parallelism = 2 if strategy == "usp" else 1
    shapes = (
        LayerShape(
            strategy=strategy,
            layout=each,
            context_parallelism=RANKS // ulysses_parallelism,
            ulysses_parallelism=ulysses_parallelism,
            seq_len=TOKENS,
            window=(size - 1, 0),
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=head_dim,
        )
        for each in (LAYOUTS if layout == "any layout" else (layout,))
    )
    (received,) = {wire_bytes(shape) for shape in shapes}  # more than one would be a column of its own
    return f"{received.forward / MIB:.1f} + {received.backward / MIB:.1f}"


if __name__ == "__main__":
    print(table())
