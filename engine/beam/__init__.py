"""Beam search over requests of one token each, which share their beginnings in the prefix tree."""
