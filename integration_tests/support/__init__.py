"""Helpers of the tests: each lives here, once."""
