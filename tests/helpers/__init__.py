"""Shared by the tests; imported as `helpers`."""
