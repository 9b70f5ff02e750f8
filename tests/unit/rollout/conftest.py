"""What tests of the native engine share."""

from tiny_engines import *  # noqa: F403 - fixtures
