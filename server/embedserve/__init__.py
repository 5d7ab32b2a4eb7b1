"""embedserve: an inference server for the embedding lookups of trained TorchRec models."""

__version__ = "0.1.0"
