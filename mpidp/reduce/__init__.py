"""Mean gradients over the ranks: buckets, autograd's hooks, and the reducers."""
