"""How far generation may run ahead of training: the bound on the age of weights that a group was sampled with."""

from __future__ import annotations

from dataclasses import dataclass

from quartet.config.errors import UserError


@dataclass(frozen=True)
class AdmissionRule:
    """How many groups may be in flight.

    `max_staleness` None is synchronous: only the groups of the step being consumed. Otherwise generation runs
    ahead, so far that no group is trained on with weights more than `max_staleness` versions newer than those
    it began with.
    """

    prompts_per_step: int
    max_staleness: int | None = None

    def num_admitted(self, *, open_steps: int, versions_published: int) -> int:
        """Groups that may be accepted or in flight, counted since the run's first step."""
        steps = open_steps if self.max_staleness is None else self.max_staleness + versions_published + 1
        return steps * self.prompts_per_step

    def check_restored(self, index: int, *, first_version: int, step: int, ahead: int) -> None:
        """
        Args:
            index: of a group that a checkpoint holds.
            first_version: of the oldest weights that made it.
            step: the one that it comes into at the latest.
            ahead: how many steps before that one the run goes on with.

        Raises:
            UserError: it would be older in that step than this rule allows.
        """
        age = max(ahead, step - first_version)
        if age > (self.max_staleness or 0):
            raise UserError(
                "the checkpoint holds groups that were generated further ahead than this run may",
                found=f"group {index} is for step {step}, made with weights of version {first_version}; "
                f"max_staleness={self.max_staleness}",
                remedy=f"resume with max_staleness of at least {age}",
            )
