"""The optimizer with its state in shards: `ShardedOptimizer`."""
