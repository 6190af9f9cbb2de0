"""Lay pieces of documents into sequences of one length, so that little is padding and none is cut."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def best_fit(lengths: np.ndarray, context_tokens: int) -> tuple[np.ndarray, int]:
    """Sequence of each piece, int64 [pieces], and the number of sequences; each piece must fit in one.

    Best fit decreasing: the longest piece first, each into the sequence where the least room is left over.
    """
    assert len(lengths) == 0 or int(lengths.max()) <= context_tokens
    sequence = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    room_left: list[int] = []  # distinct amounts of room, ascending
    with_room: dict[int, list[int]] = {}  # sequences that have exactly so much
    count = 0
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(room_left, length)
        if at == len(room_left):
            target, room = count, context_tokens
            count += 1
        else:
            room = room_left[at]
            target = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], room_left[at]
        sequence[piece] = target
        room -= length
        if room == 0:
            continue
        if room not in with_room:
            with_room[room] = []
            insort(room_left, room)
        with_room[room].append(target)
    return sequence, count
