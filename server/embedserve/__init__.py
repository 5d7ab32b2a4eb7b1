"""embedserve: serves the pooled embedding lookups of trained TorchRec models."""

__version__ = "0.1.0"
