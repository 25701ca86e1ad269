"""A plain optimizer in, one out that keeps its state in shards, one a rank: `mpidp.ShardedOptimizer`."""
