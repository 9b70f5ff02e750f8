"""What tests of text share."""

from text_fixtures import *  # noqa: F403 - fixtures
