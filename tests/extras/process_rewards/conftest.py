"""What these tests share with those of algorithms, texts and training."""

from layout_fixtures import close, make_layout  # noqa: F401 - fixtures
from small_tokenizers import byte_level, sentence_piece  # noqa: F401
from train_fixtures import batch, gradients, make_engine, make_model, models, same, weights  # noqa: F401
from trainer_fixtures import *  # noqa: F403
