"""Code rewards: a completion's code is run against tests where it can do no harm."""

from quartet.config.plugins import Plugin, RewardType

PLUGIN = Plugin(
    rewards={
        "code": RewardType("quartet.extras.sandbox.config:CodeReward", "quartet.extras.sandbox.code_tests:CodeSource")
    }
)
