"""Load a script whose name is no Python identifier, such as `04_engine.py`.

It knows file paths and `sys.modules`, nothing of engines.

    path -> unique module name -> sys.modules -> executed module
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_script(path: str | Path) -> ModuleType:
    """Execute the Python file at `path` once and return it as a module.

    Two chapters own the same file names, so the module is called `<folder>.<file stem>`. It stands in `sys.modules`
    before it runs: dataclasses with postponed annotations look their own module up there while they are defined.

    Raises FileNotFoundError if there is no such file, and whatever the script itself raises.
    """
    path = Path(path).resolve()
    name = f"{path.parent.name}.{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such script")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
