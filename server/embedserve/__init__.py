"""embedserve: an inference server for the embedding lookups of trained TorchRec models."""

from embedserve_proto import __version__ as __version__
