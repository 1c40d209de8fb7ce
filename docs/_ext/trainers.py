"""The pages of the adapters are the same wherever they are built: stand-ins take the place of the trainers."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

from sphinx.application import Sphinx

MOCKED = ["accelerate", "lightning", "transformers"]


def _keras() -> ModuleType:
    """Autodoc's own stand-in would not do: the adapter asks Keras which backend it has."""
    keras = ModuleType("keras")
    keras.__spec__ = ModuleSpec("keras", None)
    keras.Model = type("Model", (), {})
    keras.callbacks = SimpleNamespace(Callback=type("Callback", (), {}))
    keras.backend = SimpleNamespace(backend=lambda: "torch")
    return keras


def setup(app: Sphinx) -> dict[str, bool]:
    """Before any page is read."""
    app.config.autodoc_mock_imports = MOCKED
    sys.modules["keras"] = _keras()
    return {"parallel_read_safe": True}
