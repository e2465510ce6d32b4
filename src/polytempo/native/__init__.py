"""Compiled code: how it is built at first use, and the bank's pass over its rows."""
