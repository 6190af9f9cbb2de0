"""Who orthogonalises which matrix."""

from __future__ import annotations

from k3train.optim.exchange import Matrix, Piece, assign_owners


def matrix(index: int, rows: int = 8, columns: int = 8) -> Matrix:
    return Matrix("w", index, rows, columns)


def on(rank: int, start: int, stop: int, *, copy: bool = False) -> Piece:
    return Piece(0, start, stop, rank, 0, copy)


def test_a_matrix_stays_where_it_is_and_one_on_a_border_goes_to_its_larger_part() -> None:
    held = [
        (matrix(0), [on(0, 0, 64)]),
        (matrix(1), [on(0, 0, 20), on(1, 20, 64)]),
        (matrix(2), [on(1, 0, 64)]),
        (matrix(3), [on(0, 0, 40), on(1, 40, 64)]),
    ]
    assert assign_owners(held, 2) == [0, 1, 1, 0]


def test_work_is_spread_when_one_rank_holds_all_the_expensive_ones() -> None:
    cheap = [(matrix(i, rows=1, columns=640), [on(1, 0, 640)]) for i in range(4)]
    expensive = [(matrix(4 + i), [on(0, 0, 64)]) for i in range(12)]
    owners = assign_owners([*cheap, *expensive], 3)
    cost = [
        sum(m.cost for (m, _), o in zip([*cheap, *expensive], owners, strict=True) if o == r)
        for r in range(3)
    ]
    assert max(cost) <= 1.1 * sum(cost) / 3 + matrix(0).cost
    assert owners[:4].count(1) >= 3


def test_copies_do_not_make_an_owner() -> None:
    assert assign_owners([(matrix(0), [on(0, 0, 64, copy=True), on(1, 0, 64)])], 2) == [1]
