"""The messages NxD reads and writes: HLO with the public field numbers of XLA's `hlo.proto`, and a metaneff of our own.

Descriptors are built here; the SDK ships generated modules (`torch_neuronx.pyhlo`, `torch_neuronx.proto`). The
metaneff's numbers are not public: only names count (trace/functions.py, nxd_model/nxd_model.py, hlo_utils.py).
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Field = tuple[str, int, str]
"""Name, number, type: a scalar's name, `.Message`, `=Enum`; `*` before it: repeated."""

SCALARS = {
    "i64": 3,
    "i32": 5,
    "bool": 8,
    "str": 9,
    "bytes": 12,
}
MESSAGES: dict[str, list[Field]] = {
    "LayoutProto": [("minor_to_major", 1, "*i64")],
    "ShapeProto": [
        ("element_type", 2, "i32"),
        ("dimensions", 3, "*i64"),
        ("tuple_shapes", 4, "*.ShapeProto"),
        ("layout", 5, ".LayoutProto"),
    ],
    "ProgramShapeProto": [
        ("parameters", 1, "*.ShapeProto"),
        ("result", 2, ".ShapeProto"),
        ("parameter_names", 3, "*str"),
    ],
    "OpMetadata": [("op_type", 1, "str"), ("op_name", 2, "str"), ("source_file", 3, "str")],
    "FrontendAttributes": [("map", 1, "*.FrontendAttributes.MapEntry")],
    "HloInstructionProto": [
        ("name", 1, "str"),
        ("opcode", 2, "str"),
        ("shape", 3, ".ShapeProto"),
        ("metadata", 7, ".OpMetadata"),
        ("parameter_number", 9, "i64"),
        ("dimensions", 14, "*i64"),
        ("custom_call_target", 28, "str"),
        ("id", 35, "i64"),
        ("operand_ids", 36, "*i64"),
        ("called_computation_ids", 38, "*i64"),
        ("backend_config", 43, "bytes"),
        ("precision_config", 51, ".OpMetadata"),
        ("feature_group_count", 50, "i64"),
        ("batch_group_count", 58, "i64"),
        ("constrain_layout", 56, "bool"),
        ("operand_shapes_with_layout", 57, "*.ShapeProto"),
        ("frontend_attributes", 68, ".FrontendAttributes"),
        ("custom_call_api_version", 77, "i32"),
        ("statistics_viz", 82, ".OpMetadata"),
    ],
    "HloComputationProto": [
        ("name", 1, "str"),
        ("instructions", 2, "*.HloInstructionProto"),
        ("program_shape", 4, ".ProgramShapeProto"),
        ("id", 5, "i64"),
        ("root_id", 6, "i64"),
    ],
    "HloInputOutputAliasProto": [("entries", 1, "*.HloInputOutputAliasProto.AliasEntryProto")],
    "HloInputOutputAliasProto.AliasEntryProto": [
        ("output_shape_index", 1, "*i64"),
        ("parameter_number", 2, "i64"),
        ("kind", 4, "i32"),
    ],
    "HloModuleProto": [
        ("name", 1, "str"),
        ("entry_computation_name", 2, "str"),
        ("computations", 3, "*.HloComputationProto"),
        ("host_program_shape", 4, ".ProgramShapeProto"),
        ("id", 5, "i64"),
        ("entry_computation_id", 6, "i64"),
        ("input_output_alias", 8, ".HloInputOutputAliasProto"),
        ("frontend_attributes", 19, ".FrontendAttributes"),
    ],
    "MetaTensor": [
        ("name", 1, "bytes"),
        ("shape", 2, "*i64"),
        ("data_type", 3, "i32"),
        ("type", 4, "=MetaTensor.Type"),
        ("checkpoint_key", 5, "bytes"),
        ("user_input_key", 6, "bytes"),
    ],
    "MetaNeff": [
        ("input_tensors", 1, "*.MetaTensor"),
        ("output_tensors", 2, "*.MetaTensor"),
        ("output_aliases_to", 3, "*.MetaNeff.AliasEntry"),
        ("serialized_graph_def", 4, "bytes"),
    ],
}
MAPS = {
    "FrontendAttributes": ("MapEntry", "str", "str"),
    "MetaNeff": ("AliasEntry", "i64", "i64"),
}
PACKAGE = "standin"
TENSOR_KINDS = ("USER_INPUT", "INPUT_WEIGHT", "INPUT_STATE")


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="standin.proto", package=PACKAGE, syntax="proto3"
    )
    for name, fields in MESSAGES.items():
        outer, _, last = name.rpartition(".")
        holder = next((m.nested_type for m in file.message_type if m.name == outer), None)
        message = (file.message_type if holder is None else holder).add(name=last)
        if name in MAPS:
            entry, key, value = MAPS[name]
            nested = message.nested_type.add(name=entry)
            nested.options.map_entry = True
            _add_field(nested, ("key", 1, key))
            _add_field(nested, ("value", 2, value))
        if name == "MetaTensor":
            kinds = message.enum_type.add(name="Type")
            for number, kind in enumerate(TENSOR_KINDS):
                kinds.value.add(name=kind, number=number)
        for field in fields:
            _add_field(message, field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in MESSAGES
    }


def _add_field(message: Any, field: Field) -> None:
    name, number, kind = field
    added = message.field.add(name=name, number=number)
    added.label = 3 if kind.startswith("*") else 1
    kind = kind.removeprefix("*")
    if kind.startswith("."):
        added.type, added.type_name = 11, f".{PACKAGE}{kind}"
    elif kind.startswith("="):
        added.type, added.type_name = 14, f".{PACKAGE}.{kind[1:]}"
    else:
        added.type = SCALARS[kind]


MESSAGE = _build()
HloModuleProto, MetaNeff = MESSAGE["HloModuleProto"], MESSAGE["MetaNeff"]
MetaTensor = MESSAGE["MetaTensor"]
MUST_ALIAS = 2
TUPLE = 13
"""xla_data.proto's PrimitiveType of tuples."""
ELEMENT_TYPES = {"bool": 1, "int32": 4, "int64": 5, "float32": 11, "float64": 12, "bfloat16": 16}
"""torch dtype's name → xla_data.proto's PrimitiveType."""
META_TYPES = {"float32": 0, "bfloat16": 1, "int32": 2, "int64": 3, "bool": 4, "float64": 5}
META_OF_ELEMENT = {ELEMENT_TYPES[name]: number for name, number in META_TYPES.items()}
