"""Sums of tensors over ranks in the order of the tree."""
