"""What tests of text share."""

from small_tokenizers import *  # noqa: F403 - fixtures
