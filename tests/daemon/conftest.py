"""A fake machine with cards for the daemons of these tests, and for the test's own process."""

from tests.cuda.conftest import machine

__all__ = ["machine"]
