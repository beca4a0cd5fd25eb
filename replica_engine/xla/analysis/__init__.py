"""What a traced body will do, as far as its graph tells: known values, values that differ by replica, and what follows.

`known_values` computes what depends on constants and on the replica id only. `differences` finds out which tensors may
differ from replica to replica. `meetings` uses both to find collectives that only some replicas reach.
"""
