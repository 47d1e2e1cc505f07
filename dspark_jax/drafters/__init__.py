"""Drafters: how a block of tokens is proposed."""
