from quartet import Plugin, RewardType

KEYWORDS = RewardType("quartet_keywords.config:KeywordsReward", "quartet_keywords.source:Keywords")
PLUGIN = Plugin(rewards={"keywords": KEYWORDS})
