"""The reference backend: what every operation means, in numpy and float32, slow and plain.

`evaluate_node` and `evaluate_graph` run logical graphs; `ReferenceBackend` runs micro-instructions
by the same functions. Everything else must agree with them.
"""

from flashrt.backends.reference.device import ReferenceBackend, ReferenceDevice
from flashrt.backends.reference.evaluate import evaluate_graph, evaluate_node

__all__ = ["ReferenceBackend", "ReferenceDevice", "evaluate_graph", "evaluate_node"]
