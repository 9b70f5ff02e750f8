import pytest
import torch

from quartet.batch.pictures import (
    MAX_ROWS,
    collapsed,
    is_picture,
    key_of,
    keys_in,
    picture_ids,
    picture_key,
    picture_places,
    split_picture_ids,
)
from quartet.batch.ragged import RaggedBatch

LARGEST = (1 << 48) - 1


@pytest.mark.parametrize("key", [0, 1, LARGEST, picture_key(b"any")])
def test_ids_say_picture_and_row(key: int) -> None:
    ids = torch.tensor(picture_ids(key, MAX_ROWS))
    keys, rows = split_picture_ids(ids)
    assert set(keys.tolist()) == {key}
    assert rows.tolist() == list(range(MAX_ROWS))
    assert key_of(int(ids[-1])) == key
    assert bool(picture_places(ids).all())
    assert int(ids.max()) < -1, "-1 stands for ids that are elsewhere"


def test_neither_tokens_nor_unknown_ids_are_pictures() -> None:
    assert [is_picture(token) for token in (-2, -1, 0, 7)] == [True, False, False, False]
    assert picture_places(torch.tensor([-1, 0, 7])).sum() == 0


def test_keys_come_once_in_their_order() -> None:
    a, b = picture_ids(7, 2), picture_ids(3, 1)
    assert keys_in([1, *a, 2, *b, *a]) == [7, 3]
    assert collapsed([1, *a, 2, *b, *b, *a], 99) == [1, 99, 2, 99, 99, 99]


def test_keys_depend_on_every_part_and_on_where_parts_end() -> None:
    found = [picture_key(*parts) for parts in ((b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"ab", b"d"))]
    assert len(set(found)) == len(found)
    assert all(0 <= key <= LARGEST for key in found)


@pytest.mark.parametrize("num_rows", [0, MAX_ROWS + 1])
def test_numbers_of_rows_that_no_id_can_say(num_rows: int) -> None:
    with pytest.raises(ValueError, match=str(num_rows)):
        picture_ids(1, num_rows)


def test_pictures_go_wherever_ids_go() -> None:
    batch = RaggedBatch.from_groups([[1, *picture_ids(5, 3), 2]], [[[3], [4, 4]]], ["a", "b"])
    assert keys_in(batch.select([1]).token_ids(0)) == [5]
    assert batch.num_tokens == 8
