"""The same plan and cache as the command line's tests."""

from tests.cli.conftest import cache, made, plan

__all__ = ["cache", "made", "plan"]
