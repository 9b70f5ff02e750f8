"""What tests of training share."""

from train_fixtures import *  # noqa: F403 - fixtures
