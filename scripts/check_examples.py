"""Validates examples/ with Kubernetes' published schemas and with SkyPilot's own task schema.

In: the folder the validators were installed into, and examples/. Out: a line a file; exit 1 when one is wrong. Of
SkyPilot only the module with the schemas is run: the rest of it, and what that needs, is stood in for.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest import mock

import jsonschema
import kubernetes_validate
import yaml

KUBERNETES = ("1.31.0", "1.37.0")
RUN = ("utils", "utils.schemas", "utils.kubernetes_enums", "skylet", "skylet.constants",
       "setup_files", "setup_files.dependencies")  # fmt: skip
"""Modules of SkyPilot that are its own."""


class StandIns(MetaPathFinder, Loader):
    """Every other module of SkyPilot."""

    def find_spec(self, fullname, path=None, target=None):
        wanted = fullname.startswith("sky.") and fullname.removeprefix("sky.") not in RUN
        return ModuleSpec(fullname, self) if wanted else None

    def create_module(self, spec):
        return mock.MagicMock()

    def exec_module(self, module):
        return None


def skypilot_schemas(tools: Path) -> ModuleType:
    package = ModuleType("sky")
    package.__path__ = [str(tools / "sky")]
    package.__version__ = "0"
    sys.modules["sky"] = package
    lib = mock.MagicMock()
    lib.AutostopWaitFor.supported_modes.return_value = ["none"]
    sys.modules["sky.skylet.autostop_lib"] = lib
    sys.meta_path.insert(0, StandIns())
    from sky.utils import schemas

    return schemas


def check_skypilot(path: Path, tools: Path) -> list[str]:
    task = yaml.safe_load(path.read_text(encoding="utf-8"))
    schemas = skypilot_schemas(tools)
    found = []
    for part, schema in (
        (task, schemas.get_task_schema()),
        (task["resources"], schemas.get_resources_schema()),
    ):
        validator = jsonschema.Draft7Validator(schema)
        found += [error.message for error in validator.iter_errors(part)]
    return found


def check_kubernetes(path: Path) -> list[str]:
    found = []
    for version in KUBERNETES:
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                found.append(f"{version}: {error.message}")
    return found


def main() -> int:
    tools, examples = Path(sys.argv[1]), Path(sys.argv[2])
    wrong = 0
    checked = [
        (path.name, check_kubernetes(path)) for path in sorted(examples.glob("kubernetes-*"))
    ]
    checked.append(("skypilot.yaml", check_skypilot(examples / "skypilot.yaml", tools)))
    for name, found in checked:
        print(f"{name}: {'ok' if not found else '; '.join(found)}")
        wrong += bool(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
