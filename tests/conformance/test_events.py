"""Events: each happens in a case built to have it, and not in its nearest neighbour without it."""

import pytest

from conformance.case_text import parse_case
from conformance.events import EVENTS, events_of

# Four contiguous chunks of 8, or eight of 4 under dual_chunk_swap, unless a text says otherwise.
BASE = "seq_len=32 context_parallelism=4 num_query_heads=4 num_kv_heads=2"

# event, a case in which it happens, the nearest case in which it does not.
EXAMPLES = [
    ("0 hops", "sliding_window_size=1", "sliding_window_size=2"),
    ("1 hops", "sliding_window_size=9", "sliding_window_size=10"),
    ("1 hops", "window=0,8", "window=0,9"),
    ("2 hops", "sliding_window_size=17", "sliding_window_size=9"),
    ("2 hops", "sliding_window_size=6 layout=dual_chunk_swap", "sliding_window_size=5 layout=dual_chunk_swap"),
    ("3 or more hops", "sliding_window_size=18", "sliding_window_size=17"),
    ("3 or more hops", "sliding_window_size=18", "sliding_window_size=18 layout=striped"),
    ("halo of every other chunk", "sliding_window_size=18", "sliding_window_size=17"),
    ("pair meets inside the rank", "sliding_window_size=2 layout=dual_chunk_swap", "sliding_window_size=2"),
    ("window starts on a chunk border", "sliding_window_size=17", "sliding_window_size=16"),
    ("window of exactly a chunk", "sliding_window_size=8", "sliding_window_size=9"),
    ("window of the query alone", "sliding_window_size=1", "window=0,1"),
    ("window longer than the sequence", "sliding_window_size=33", "sliding_window_size=32"),
    ("window of the whole past", "", "sliding_window_size=32"),
    ("window of the whole future", "window=2,none", "window=2,31"),
    ("keys after the query", "window=0,1", "window=1,0"),
    ("keys on both sides", "window=1,1", "window=0,1"),
    ("one rank", "context_parallelism=1", "context_parallelism=2"),
    (
        "three or more batch rows a shard",
        "batch=6 data_parallelism=2",
        "batch=4 data_parallelism=2",
    ),
    ("odd number of ranks", "context_parallelism=3 seq_len=24", "context_parallelism=1"),
    (
        "five or more ranks beside another axis",
        "context_parallelism=8 tensor_parallelism=2",
        "context_parallelism=4 tensor_parallelism=2",
    ),
    ("bfloat16", "dtype=bfloat16", "dtype=float32"),
    ("float64", "dtype=float64", "dtype=float32"),
    ("sinks", "sinks=true", "sinks=false"),
    ("soft cap", "attn_logits_soft_cap=5.0", "scale=5.0"),
    ("scale given", "scale=1.0", "attn_logits_soft_cap=1.0"),
    ("documents", "documents=32", "seed=1"),
    ("padding", "padding=0 documents=30@1+2@0", "documents=30@1+2@0"),
    ("head_dim of 64 or more", "head_dim=64", "head_dim=63"),
    ("Explicit axes", "axis_types=explicit", "axis_types=mixed"),
    ("mixed axis types", "axis_types=mixed", "axis_types=explicit"),
    ("devices reversed", "device_order=reversed", "device_order=natural"),
    ("sequence on two axes", "ulysses_parallelism=2", "ulysses_parallelism=1"),
    (
        "data and tensor axes at once",
        "data_parallelism=2 batch=2 tensor_parallelism=2",
        "data_parallelism=2 batch=2",
    ),
    (
        "context is not the middle axis",
        "tensor_parallelism=2 mesh_axes=data,tensor,context",
        "mesh_axes=data,tensor,context",
    ),
    ("kv heads replicated over tensor", "tensor_parallelism=4", "tensor_parallelism=2"),
    (
        "tensor shards cut kv groups unevenly",
        "num_query_heads=6 num_kv_heads=3 tensor_parallelism=2",
        "num_query_heads=4 num_kv_heads=1 tensor_parallelism=2",
    ),
    ("several query heads a kv head", "num_kv_heads=2", "num_kv_heads=1"),
    ("one kv head for all", "num_kv_heads=1", "num_kv_heads=1 num_query_heads=1"),
    ("document starts on a chunk border", "documents=16+16", "documents=15+17"),
    ("document starts one before a chunk border", "documents=15+17", "documents=16+16"),
    ("document starts one after a chunk border", "documents=17+15", "documents=16+16"),
    ("document over a chunk border", "documents=7+2+23", "documents=8+8+8+8"),
    ("document over several chunk borders", "documents=7+10+15", "documents=7+9+8+8"),
    ("document of one token", "documents=31+1", "documents=30+2"),
    (
        "id seen again across another document",
        "documents=15@1+2@2+15@1 sliding_window_size=4",
        "documents=15@1+2@2+15@1 sliding_window_size=3",
    ),
    (
        "id seen again across another document",
        "documents=15@1+2@2+15@1 window=0,3",
        "documents=15@1+2@1+15@1 window=0,3",
    ),
    ("batch rows cut differently", "batch=2 documents=16+16/15+17", "batch=2 documents=16+16/16+16"),
    ("negative id", "documents=16@-1+16@1", "documents=16@0+16@1"),
    ("id 0", "documents=16@0+16@1", "documents=16@0+16@1 padding=0"),
    ("empty row", "documents=16@1+16@9 padding=9", "documents=16@1+16@9 padding=8"),
    ("empty row", "documents=16@1+16@9 padding=9", "documents=16@1+16@9 padding=9 sinks=true"),
    ("empty row with a sink", "documents=16@1+16@9 padding=9 sinks=true", "documents=16@1+16@9 padding=9"),
    ("padding id 0", "documents=16@1+16@0 padding=0", "documents=16@1+16@0"),
    ("negative padding id", "documents=16@1+16@-1 padding=-1", "documents=16@-1+16@1 padding=1"),
    ("chunk without tokens", "documents=24@1+8@9 padding=9", "documents=25@1+7@9 padding=9"),
    ("logits beyond the cap", "attn_logits_soft_cap=5", "attn_logits_soft_cap=50"),
    ("structured values", "values=constant", "values=plain"),
    ("value is the key", "shared_kv=true", "shared_kv=false"),
    ("value_dim differs from head_dim", "value_dim=4", "value_dim=8"),
    ("remat with heads for every rank", "seed=77", "seed=78"),
    ("remat with heads for every rank", "seed=77", "seed=77 num_query_heads=6"),
    (
        "remat with heads for every rank",
        "seed=77 ulysses_parallelism=2 num_query_heads=8",
        "seed=77 context_parallelism=1",
    ),
    ("remat with the sequence on two axes", "seed=77 ulysses_parallelism=2", "seed=77"),
    (
        "remat with the sequence on two axes",
        "seed=77 ulysses_parallelism=2 tensor_parallelism=2",
        "seed=77 ulysses_parallelism=2 tensor_parallelism=4",
    ),
]


def events(text):
    words = dict(word.split("=") for word in f"{BASE} {text}".split())
    return events_of(parse_case(" ".join(f"{key}={value}" for key, value in words.items())))


@pytest.mark.parametrize(("event", "with_it", "without"), EXAMPLES)
def test_an_event_happens_with_its_cause_and_not_without(event, with_it, without):
    assert event in events(with_it), f"{with_it} has it"
    assert event not in events(without), f"{without} does not"


def test_a_dominating_sink_is_seen_and_a_missing_one_is_not():
    seeds = range(40)
    dominated = sum("sink dominates" in events(f"sinks=true num_query_heads=2 seed={seed}") for seed in seeds)
    # A quarter of the sinks are drawn well above the largest logit; two heads each.
    assert 8 < dominated < 30, f"in {dominated} of 40 cases some head's sink is above every logit"
    assert not any("sink dominates" in events(f"seed={seed}") for seed in seeds), "no sinks, no event"


def test_every_event_has_an_example():
    assert {event for event, _, _ in EXAMPLES} | {"sink dominates"} == set(EVENTS), "no event without its test"
