"""What tests of rows share."""

from trainer_fixtures import *  # noqa: F403 - fixtures
