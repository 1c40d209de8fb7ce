"""The pages of the adapters are the same wherever they are built: stand-ins take the trainers' places."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

from sphinx.application import Sphinx


def _stand_in(name: str, **contents: object) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(contents)
    sys.modules[name] = module


def _class(name: str) -> type:
    return type(name, (), {})


def setup(app: Sphinx) -> dict[str, bool]:
    """Before any page is read."""
    app.config.autodoc_mock_imports = ["transformers"]
    # For these autodoc's own stand-ins would not do: the adapter asks Keras which backend it has, and a class
    # that is derived from a mocked one loses its signature.
    _stand_in("accelerate")
    _stand_in("accelerate.data_loader", DataLoaderStateMixin=_class("DataLoaderStateMixin"))
    _stand_in("accelerate.state", GradientState=None)
    _stand_in("accelerate.utils", send_to_device=None)
    _stand_in(
        "keras",
        Model=_class("Model"),
        callbacks=SimpleNamespace(Callback=_class("Callback")),
        backend=SimpleNamespace(backend=lambda: "torch"),
    )
    _stand_in("lightning")
    _stand_in("lightning.pytorch", Callback=_class("Callback"))
    return {"parallel_read_safe": True}
