from quartet.rewards.source import RewardSource
from quartet_keywords.config import KeywordsReward


class Keywords(RewardSource):
    def __init__(self, config: KeywordsReward) -> None:
        self.name, self.words = config.name, [word.lower() for word in config.words]

    async def score(self, prompts, completions, columns):
        return [sum(word in text.lower() for word in self.words) / len(self.words) for text in completions]
