"""Helpers that several test files share: no test file imports another one."""
