"""What tests of trainers share."""

from trainer_fixtures import *  # noqa: F403 - fixtures
