"""Gradients in, mean gradients out: flat buckets, and the strategies that sum them over ranks."""
