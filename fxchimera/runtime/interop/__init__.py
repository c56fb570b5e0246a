"""What only ``torch.distributed.pipelining`` needs."""
