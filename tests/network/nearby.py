"""Patience, and ports that are free."""

import time

from polytempo.network.session import free_ports

__all__ = ["free_ports", "wait_until"]


def wait_until(true):
    """Wait for something that another thread or process brings about."""
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)
