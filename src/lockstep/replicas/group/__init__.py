"""`ReplicaGroup`: the forward and backward of one model on several devices."""
