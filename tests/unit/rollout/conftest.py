"""What tests of engines share."""

from engine_fixtures import *  # noqa: F403 - fixtures
