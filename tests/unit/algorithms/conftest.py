"""What tests of algorithms share."""

from layout_fixtures import *  # noqa: F403 - fixtures
