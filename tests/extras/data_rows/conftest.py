"""What tests of rows share."""

from small_tokenizers import *  # noqa: F403 - fixtures
from trainer_fixtures import *  # noqa: F403 - fixtures
