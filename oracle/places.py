"""Where faults of context parallelism live: the places that a probe looks at by default.

Both sides of every chunk border, the edges of the windows that reach across it, document borders, the first and last
tokens, and a random sample. NumPy only. Tested in tests/oracle/test_places.py.
"""

from typing import Literal

import numpy as np

from oracle.arguments import Window
from oracle.mask import most_visible
from oracle.outline import Outline
from oracle.probe import Place

# A key is as dear as a window of queries, so fewer keys are looked at than queries.
QUERY_GROUPS = 64
KEY_GROUPS = 16
# A key whose readers see more keys than this in all, in one query head, is left out: seconds each. (A window of 4096
# has 2^25.) Without a bound few keys have so few readers, and sums over all keys hold the others (identities.py): less
# is spent on them.
KEY_PAIRS = 2**26
UNBOUNDED_KEY_PAIRS = 2**24


def default_places(
    outline: Outline, *, chunk: int, seed: int, query_groups: int = QUERY_GROUPS, key_groups: int = KEY_GROUPS
) -> list[Place]:
    """Places for a case whose chunks (contiguous runs of one rank) are `chunk` positions long.

    Places come in groups of neighbours, each at one batch row and kv head; these rotate from group to group, so that
    all are looked at. Where there are more groups than asked for, the first and last token stay and the rest is drawn.
    Without a bound on one side of the window only the keys near its other end have few enough readers to be probed.

    Raises:
        ValueError: if chunk, query_groups or key_groups is not >= 1.
    """
    for name, value in (("chunk", chunk), ("query_groups", query_groups), ("key_groups", key_groups)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    random = np.random.default_rng(seed)
    left, right = outline.window
    queries = _groups(outline, chunk, before=right, after=left, random=random)
    keys = _groups(outline, chunk, before=left, after=right, random=random)
    pairs = UNBOUNDED_KEY_PAIRS if None in outline.window else KEY_PAIRS
    affordable = pairs // most_visible(outline.window, outline.seq_len)
    keys = [group for group in keys if _readers(outline, group[0]) <= affordable]
    return [
        *_placed("query", queries, query_groups, outline, random),
        *_placed("key", keys, key_groups, outline, random),
    ]


def leaves_keys_out(window: Window, seq_len: int) -> bool:
    """Whether keys of a whole window of readers are too dear to probe, so that only those near an end are looked at."""
    return None in window or most_visible(window, seq_len) ** 2 > KEY_PAIRS


def _readers(outline: Outline, key: int) -> int:
    """How many queries have this key in their window."""
    left, right = outline.window
    first = 0 if right is None else max(0, key - right)
    last = outline.seq_len - 1 if left is None else min(outline.seq_len - 1, key + left)
    return last - first + 1


def _groups(
    outline: Outline, chunk: int, *, before: int | None, after: int | None, random: np.random.Generator
) -> list[list[int]]:
    """Groups of neighbouring positions; the first two hold the first and the last token.

    A border lies between positions b - 1 and b. A query sees across it from b on up to b - 1 + left (and one further
    does not), and from b - 1 down to b - right; for keys left and right change places.
    """
    last = outline.seq_len - 1
    groups = [[0, 1], [last - 1, last]]
    for border in range(chunk, outline.seq_len, chunk):
        groups.append([border - 1, border])
        if after:
            groups.append([border - 1 + after, border + after])
        if before:
            groups.append([border - 1 - before, border - before])
    if after:
        groups.append([after, after + 1])
    if outline.segment_ids is not None:
        ids = np.asarray(outline.segment_ids)
        groups += [[int(start) - 1, int(start)] for start in np.unique(np.nonzero(np.diff(ids, axis=1))[1] + 1)]
    groups += [[int(position)] for position in random.integers(outline.seq_len, size=max(2, len(groups) // 4))]
    return [inside for group in groups if (inside := sorted({p for p in group if 0 <= p <= last}))]


def _placed(
    side: Literal["query", "key"], groups: list[list[int]], most: int, outline: Outline, random: np.random.Generator
) -> list[Place]:
    """At most so many groups, each at the next kv head of the next batch row."""
    always, rest = groups[:2], groups[2:]
    chosen = random.permutation(len(rest))[: max(0, most - len(always))]
    heads = list(np.ndindex(outline.batch, outline.num_kv_heads))
    first = int(random.integers(len(heads)))
    places = []
    for index, group in enumerate([*always[:most], *(rest[i] for i in sorted(chosen))]):
        batch_row, kv_head = heads[(first + index) % len(heads)]
        places += [Place(side, batch_row, kv_head, position) for position in group]
    return places
