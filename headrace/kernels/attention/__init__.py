"""Raw attention kernels, called by the backends in ``layers/attention``; which one serves a model is chosen there."""
