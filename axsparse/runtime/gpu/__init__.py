"""The transport between ranks with GPUs: contents by NCCL or by way of the host."""
