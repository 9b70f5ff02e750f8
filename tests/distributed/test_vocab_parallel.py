"""A vocabulary in parts gives the results and gradients of a whole one, and sends ``[M]`` numbers."""

from __future__ import annotations

import pytest
import torch

import rank_forks
import vocabulary_ranks as ranks
from quartet.models.logprobs import Limits, LogprobRule, token_logprobs
from quartet.train.parallel.tensor import VocabParallel
from vocabulary_ranks import HeadCase

CASES = [
    HeadCase(),
    HeadCase(bias=True, temperature=0.7, softcap=2.0),
    HeadCase(scale=0.3, entropy_grad=False, chunk=100),
    HeadCase(entropy=False, bias=True),
    HeadCase(num_rows=0),
    HeadCase(torch.float32, softcap=3.0, scale=1.5),
    HeadCase(torch.float32, torch.bfloat16, temperature=0.9),
]


@pytest.mark.parametrize("world", [2, 4])
def test_a_head_in_parts_is_the_whole_one(world, tolerances) -> None:
    found = rank_forks.run_ranks(world, ranks.all_heads, CASES)
    for rank, (heads, sent) in enumerate(found):
        for case, of_case in zip(CASES, heads, strict=True):
            expected = ranks.run_head(case)
            assert of_case.keys() == expected.keys(), case
            atol, rtol = tolerances[case.compute_dtype or case.dtype]
            for name, values in expected.items():
                torch.testing.assert_close(
                    of_case[name], values, atol=atol, rtol=rtol, msg=lambda m, c=case: f"{c} {m}"
                )
                assert torch.equal(of_case[name], found[0][0][CASES.index(case)][name]), (case, rank)
        numbers = sum(c.num_rows * (3 if c.entropy else 2) * (8 if c.dtype == torch.float64 else 4) for c in CASES)
        assert sent == {"all-gather": (world - 1) * numbers}


class _Ranks:
    size, rank = 8, 0


def test_what_cannot_be_in_parts_is_refused() -> None:
    part = VocabParallel(16, _Ranks())
    limited = LogprobRule(torch.float32, limits=Limits(2, 1.0, 0.0))
    with pytest.raises(ValueError, match="whole vocabulary"):
        token_logprobs(torch.ones(1, 2), torch.ones(16, 2), None, torch.zeros(1, dtype=torch.int64), limited, part)
