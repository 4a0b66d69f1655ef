"""Checkpoint formats: a scheme for each, which reads its tensors into `CodedMatrix`."""
