"""Batch norm on several ranks: statistics of all combined now and then, or layers over the samples of all."""
