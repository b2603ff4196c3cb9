"""What a cluster will gain, before it is rented or bought: the Python side of `plan` and `simulate`."""
