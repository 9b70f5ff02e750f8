"""Rows of the table of metrics that evaluation and its alarm log: name, unit, meaning, what a bad value looks like."""

from __future__ import annotations

EVALUATION_ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "eval/exact_match",
        "fraction",
        "Held-out prompts answered exactly as the checker wants.",
        "Falls while reward/score_mean rises: the reward is being exploited.",
    ),
    (
        "eval/score_mean",
        "reward",
        "Mean score on held-out prompts.",
        "Falls behind reward/score_mean.",
    ),
    (
        "eval/accuracy",
        "fraction",
        "Held-out pairs whose chosen answer scores strictly higher (preferences: has the higher implicit reward); "
        "process rewards: held-out steps on the right side of one half.",
        "Within its interval of one half: nothing is learned. Far below the accuracy in training: overfitting.",
    ),
    (
        "eval/accuracy_low",
        "fraction",
        "Lower end of the 95 % interval of eval/accuracy (reward model): Wilson's, or where pairs share prompts the "
        "bootstrap over prompts.",
        "Below eval/longer_answer_accuracy: these pairs do not show that more than length is learned.",
    ),
    (
        "eval/accuracy_high",
        "fraction",
        "Upper end of that interval.",
        "Far from its lower end: use more held-out pairs.",
    ),
    (
        "eval/longer_answer_accuracy",
        "fraction",
        "Held-out pairs whose chosen answer has more tokens than the rejected one, equal lengths counting half: what "
        "length alone tells (reward model).",
        "Near or above eval/accuracy: the reward may be mere length.",
    ),
    (
        "eval/offset",
        "reward",
        "Mean score of both sides of the held-out pairs (reward model).",
        "Drifts away from 0: set centring.",
    ),
    (
        "eval/score_se",
        "reward",
        "Standard error over prompts of the held-out score (eval/score_mean, or the source that the alarm watches).",
        "As large as the changes you want to see: evaluate on more prompts.",
    ),
    (
        "eval/training_score_mean",
        "reward",
        "Mean training reward on held-out prompts, where evaluation has rewards of its own.",
        "Rises while eval/score_mean falls: the reward is being exploited.",
    ),
    (
        "eval/win_rate",
        "fraction",
        "Share of good pairs of answers plus half of the same ones, against the model compared with.",
        "Its interval holds one half: no difference is shown.",
    ),
    (
        "eval/good",
        "fraction",
        "Pairs of answers in which that of the evaluated model is better.",
        "Below eval/bad.",
    ),
    (
        "eval/same",
        "fraction",
        "Pairs of answers that are equally good: a tie, or a judge that changes its mind with the places.",
        "Near 1: the prompts do not tell the models apart.",
    ),
    (
        "eval/bad",
        "fraction",
        "Pairs of answers in which that of the evaluated model is worse.",
        "Above eval/good.",
    ),
    (
        "eval/no_verdict",
        "pairs",
        "Pairs of answers that could not be compared; they are left out.",
        "More than a few: the reward does not apply, or the judge does not answer.",
    ),
    (
        "eval/<source>/exact_match",
        "fraction",
        "Held-out samples that are right: the source's score reaches the threshold. The same as pass@1.",
        "Falls while reward/score_mean rises: the reward is being exploited.",
    ),
    (
        "eval/<source>/pass@<k>",
        "fraction",
        "Probability that at least one of k samples is right, unbiased, mean over held-out prompts.",
        "Falls while exact match rises: answers become alike, and what few samples found is lost.",
    ),
    (
        "eval/<source>/maj@<k>",
        "fraction",
        "Whether the most frequent answer of k samples is right, mean over held-out prompts; ties count their mean.",
        "Below exact match: the frequent answers are the wrong ones.",
    ),
    (
        "eval/<source>/tied@<k>",
        "fraction",
        "Votes of k samples in which several answers were equally frequent.",
        "Above 0.3: take more samples, or say what an answer is (grading.answer).",
    ),
    (
        "alarm/reward_hacking",
        "0 or 1",
        "1 where the training reward rose and the held-out score fell since its best evaluation, both beyond noise.",
        "1: compare the answers of both evaluations before training on.",
    ),
    (
        "alarm/held_out_p",
        "1",
        "p-value of the held-out score's fall since its best evaluation (paired over prompts; 1 without a fall).",
        "Nears 0 from evaluation to evaluation.",
    ),
    (
        "alarm/training_p",
        "1",
        "p-value of the training reward's rise since that evaluation (slope over its steps; 1 without a rise).",
        "Near 0 together with alarm/held_out_p.",
    ),
    (
        "iterated/pairs",
        "pairs",
        "Fresh preference pairs of the round.",
        "Few: the labeller hardly tells the policy's answers apart.",
    ),
    (
        "iterated/label_mean",
        "reward",
        "Mean label of the answers that the round's policy gave.",
        "Falls from round to round: the policy pleases the reward model, not the labeller.",
    ),
    (
        "iterated/stale_accuracy",
        "fraction",
        "Fresh pairs that the reward model of the round before ranks as the labeller does (ties count one half).",
        "Far below its held-out accuracy: the policy has moved to answers which that model does not know.",
    ),
    (
        "eval/<name>",
        "as named",
        "A held-out figure of the recipe's own evaluation.",
        "Moves against the training score.",
    ),
)
