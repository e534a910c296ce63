"""Local attention kernels: what one rank computes on the rows it holds. All share the signature in interface.py."""
