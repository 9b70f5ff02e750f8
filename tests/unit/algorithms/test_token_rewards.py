import torch

from quartet.algorithms.advantages import completion_rewards, penalise_missing_eos, token_rewards


def test_by_hand():
    # Trajectory 0 acts at 1 and 3 (2 is an observation), trajectory 1 at 4; token 0 is the prompt.
    owner = torch.tensor([-1, 0, -1, 0, 1])
    kl = torch.tensor([float("nan"), 1.0, float("inf"), 2.0, -4.0])
    rewards = token_rewards(torch.tensor([10.0, 20.0]), kl, 0.5, owner)
    assert rewards.tolist() == [0.0, -0.5, 0.0, 9.0, 22.0]
    assert completion_rewards(torch.tensor([10.0, 20.0]), kl, 0.5, owner).tolist() == [8.5, 22.0]


def test_matches_a_loop(make_layout, close):
    layout = make_layout(4)
    kl = layout.poisoned(layout.normal(0), float("-inf"))
    scores = torch.arange(layout.num_owners, dtype=torch.float64)
    rewards = token_rewards(scores, kl, 0.3, layout.acting)
    expected = torch.zeros(layout.num_tokens, dtype=torch.float64)
    for n in range(layout.num_owners):
        tokens = layout.tokens_of(n)
        for t in tokens:
            expected[t] = -0.3 * kl[t]
        if tokens:
            expected[tokens[-1]] += scores[n]
    close(rewards, expected)


def test_missing_eos_penalty():
    scores = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert penalise_missing_eos(scores, torch.tensor([True, False]), 0.5).tolist() == [1.0, 1.5]
