"""Prints the table of docs/strategies.md: bytes on the wire for each published model, strategy and layout.

May touch: nothing. `python bench/wire_bytes.py`. Tested in tests/impl/test_wire_bytes.py.
"""

from impl.wire_bytes import LayerShape, wire_bytes

# (name, query heads, kv heads, head_dim, window W): the local layers of the published configurations.
MODELS = (
    ("Gemma 2 9B", 16, 8, 256, 4096),
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
COLUMNS = tuple(
    (strategy, layout)
    for strategy in ("halo", "all_gather", "ring", "ulysses")
    for layout in ("contiguous", "dual_chunk_swap")
)
TOKENS, RANKS, MIB = 131072, 8, 2**20


def table() -> str:
    """MiB that arrive at the busiest rank, "forward + backward", for one layer at batch 1 in bfloat16."""
    header = ["model (local layers)", *(f"{strategy}, {layout}" for strategy, layout in COLUMNS)]
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    for name, num_query_heads, num_kv_heads, head_dim, size in MODELS:
        cells = [name]
        for strategy, layout in COLUMNS:
            shape = LayerShape(
                strategy=strategy,
                layout=layout,
                context_parallelism=RANKS,
                seq_len=TOKENS,
                window=(size - 1, 0),
                num_query_heads=num_query_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                value_dim=head_dim,
            )
            received = wire_bytes(shape)
            cells.append(f"{received.forward / MIB:.1f} + {received.backward / MIB:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
