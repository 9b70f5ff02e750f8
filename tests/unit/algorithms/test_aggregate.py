from dataclasses import replace

import pytest
import torch

from quartet.algorithms.losses import LossTokens, aggregate_loss, aggregation_denominators

MODES = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"]
NORM = 16.0


def slow_aggregate(values, layout, mode):
    rows = [values[layout.tokens_of(n)] for n in range(layout.num_owners)]
    rows = [row for row in rows if len(row)]
    match mode:
        case "token_mean":
            return torch.cat(rows).mean()
        case "sequence_mean_token_mean":
            return torch.stack([row.mean() for row in rows]).mean()
        case "sequence_mean_token_sum":
            return torch.stack([row.sum() for row in rows]).mean()
        case "sequence_mean_token_sum_norm":
            return torch.stack([row.sum() / NORM for row in rows]).mean()


@pytest.mark.parametrize("mode", MODES)
def test_matches_a_loop(mode, make_layout, close):
    layout = make_layout(0)
    values = layout.poisoned(layout.normal(1), float("-inf"))
    close(aggregate_loss(values, layout.tokens(mode, norm=NORM)), slow_aggregate(values, layout, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_parts", [2, 5, 60])
def test_micro_batches_add_up(mode, num_parts, make_layout, close):
    # Tokens of one owner land in several micro-batches, and some micro-batches have no loss token.
    layout = make_layout(6)
    values = layout.normal(1)
    whole = aggregate_loss(values, layout.tokens(mode, norm=NORM))
    part = torch.arange(layout.num_tokens) * num_parts // layout.num_tokens
    part = part[torch.randperm(layout.num_tokens, generator=torch.Generator().manual_seed(1))]
    shares = [aggregate_loss(values[part == p], layout.tokens(mode, part == p, NORM)) for p in range(num_parts)]
    close(torch.stack(shares).sum(), whole)


@pytest.mark.parametrize("mode", MODES)
def test_ranks_add_up_with_summed_denominators(mode, make_layout, close):
    # Two ranks number their own trajectories; only the two counts are summed over ranks.
    layout = make_layout(7)
    values = layout.normal(1)
    whole = aggregate_loss(values, layout.tokens(mode, norm=NORM))
    ranks = [layout.owner < 2, layout.owner >= 2]
    local = [
        aggregation_denominators(layout.mask[own], layout.owner[own], layout.num_owners, norm=NORM) for own in ranks
    ]
    num_tokens, num_sequences = sum(d.num_tokens for d in local), sum(d.num_sequences for d in local)
    shares = []
    for own, d in zip(ranks, local, strict=True):
        summed = replace(d, num_tokens=num_tokens, num_sequences=num_sequences)
        shares.append(aggregate_loss(values[own], LossTokens(layout.mask[own], layout.owner[own], summed, mode)))
    close(sum(shares), whole)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_train_on_is_zero_with_zero_gradient(mode):
    values = torch.full((3,), float("-inf"), requires_grad=True)
    mask, owner = torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    loss = aggregate_loss(values, LossTokens(mask, owner, aggregation_denominators(mask, owner, 1, norm=NORM), mode))
    loss.backward()
    assert loss.item() == 0 and values.grad.tolist() == [0, 0, 0]


def test_refusals_and_unchanged_inputs(make_layout, unchanged):
    layout = make_layout(0)
    with pytest.raises(ValueError, match="needs denominators with a norm"):
        aggregate_loss(layout.normal(0), layout.tokens("sequence_mean_token_sum_norm"))
    unchanged(aggregate_loss, layout.normal(0), layout.tokens("sequence_mean_token_mean"))
    unchanged(aggregation_denominators, layout.mask, layout.owner, layout.num_owners)
