"""Columns of the running requests: comings, moves and goings against a plain list; the way back to the host."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quartet.rollout.cuda_pages import IDLE_PAGE
from quartet.rollout.cuda_rows import DeviceRows, Entry, Readback
from quartet.rollout.protocol import SamplingParams

CPU = torch.device("cpu")
WIDTH = 3


def entry(number: int) -> Entry:
    sampling = SamplingParams(temperature=0.5 + number, top_k=number + 1, seed=2**63 + number)
    return Entry(number, 10 + number, 20 + number, (number + 1,) * (1 + number % WIDTH), sampling)


def contents(rows: DeviceRows) -> list[tuple[object, ...]]:
    columns = (rows.tokens, rows.positions, rows.num_generated, rows.active, rows.tables)
    sampling = rows.sampling
    every = zip(*(c.tolist() for c in (*columns, sampling.temperature, sampling.top_k, sampling.seeds)), strict=True)
    return [tuple(row) for row in every]


def test_an_entry_is_all_that_a_row_knows() -> None:
    rows = DeviceRows(3, WIDTH, vocab_size=90, device=CPU)
    rows.place([1], [entry(5)])
    assert contents(rows)[1] == (5, 15, 25, 1, [6, 6, 6], [5.5], [6], -(2**63) + 5)
    assert [row[:5] for i, row in enumerate(contents(rows)) if i != 1] == [(0, 0, 0, 0, [IDLE_PAGE] * WIDTH)] * 2


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_moves_happen_one_after_the_other(moves: list[tuple[int, int]]) -> None:
    rows = DeviceRows(6, WIDTH, vocab_size=90, device=CPU)
    rows.place(list(range(6)), [entry(i) for i in range(6)])
    expected = contents(rows)
    for source, target in moves:
        expected[target] = expected[source]
    rows.move(moves)
    assert contents(rows) == expected


def test_wider_tables_take_everything_over() -> None:
    narrow = DeviceRows(4, WIDTH, vocab_size=90, device=CPU)
    narrow.place([0, 2], [entry(1), entry(2)])
    wide = DeviceRows(4, WIDTH + 2, vocab_size=90, device=CPU)
    wide.take(narrow)
    padded = [(*row[:4], [*row[4], IDLE_PAGE, IDLE_PAGE], *row[5:]) for row in contents(narrow)]
    assert contents(wide) == padded


def test_a_step_advances_active_rows_only() -> None:
    rows = DeviceRows(4, WIDTH, vocab_size=90, device=CPU)
    rows.place([0, 2], [entry(1), entry(2)])
    rows.advance(torch.tensor([7, 8, 9]), torch.tensor([-0.5, -1.0, -2.0]))
    assert rows.tokens.tolist() == [7, 0, 9, 0]
    assert rows.positions.tolist() == [12, 0, 13, 0]
    assert rows.num_generated.tolist() == [22, 0, 23, 0]
    assert rows.picked_tokens[:3].tolist() == [7, 8, 9]
    rows.clear([0])
    rows.advance(torch.tensor([1, 1, 1]), torch.zeros(3))
    assert rows.positions.tolist() == [0, 0, 14, 0]
    assert rows.tables[0].tolist() == [IDLE_PAGE] * WIDTH


def test_steps_come_back_in_the_order_in_which_they_were_sent() -> None:
    rows = DeviceRows(2, WIDTH, vocab_size=90, device=CPU)
    back = Readback(2, CPU, depth=2)
    for step in range(2):
        rows.advance(torch.tensor([step, 5]), torch.tensor([-float(step), -5.0]))
        back.send(rows, 2 - step)
    assert len(back) == 2
    with pytest.raises(RuntimeError, match="receive a step"):
        back.send(rows, 2)
    assert back.receive(2) == ([0, 5], [0.0, -5.0])
    assert back.receive(1) == ([1], [-1.0])
    back.send(rows, 1)
