"""Rows of a step in, its batch out: read ahead, in memory that is used in turn, transformed, on the device."""
