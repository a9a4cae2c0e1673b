"""Communication between ranks, without autograd."""
