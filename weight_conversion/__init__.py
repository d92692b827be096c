"""Converts checkpoints to plain data and back: an `Architecture`, and named tensors in one layout.

`open_checkpoint(path)` recognises the family, checks every tensor by name and shape, and reads tensor by tensor.
`export(tensors, architecture, path)` applies the same table in reverse. This package knows nothing of hooks or models.
"""

from weight_conversion.architecture import (
    Architecture,
    Context,
    Experts,
    GlobalLayers,
    NoiseSchedule,
    PositionKind,
    QueryScale,
    RotaryScaling,
    TimeConditioning,
    Variant,
    YarnScaling,
)
from weight_conversion.constant_conditioning import fold, folded_architecture, is_constant, unfolded_architecture
from weight_conversion.convert import (
    Checkpoint,
    check_export,
    export,
    export_size,
    family_of,
    open_checkpoint,
    require_config,
)
from weight_conversion.families.lit_gpt import PUBLISHED_SIZES, published_architecture
from weight_conversion.files import (
    ALIGNMENT,
    CHECKPOINT_SUFFIXES,
    SafetensorsFile,
    renamed_when_whole,
    sha256_of_file,
    write_json,
    write_safetensors,
)
from weight_conversion.json_files import (
    JsonError,
    as_json,
    from_json,
    parse_json,
    read_json,
    read_json_object,
    restore_numbers,
    to_json,
)
from weight_conversion.key_map import N_FREQUENCIES, n_params, tensor_shapes
from weight_conversion.registry import mode_read

__all__ = [
    "ALIGNMENT",
    "CHECKPOINT_SUFFIXES",
    "N_FREQUENCIES",
    "PUBLISHED_SIZES",
    "Architecture",
    "Checkpoint",
    "Context",
    "Experts",
    "GlobalLayers",
    "JsonError",
    "NoiseSchedule",
    "PositionKind",
    "QueryScale",
    "RotaryScaling",
    "SafetensorsFile",
    "TimeConditioning",
    "Variant",
    "YarnScaling",
    "as_json",
    "check_export",
    "export",
    "export_size",
    "family_of",
    "fold",
    "folded_architecture",
    "from_json",
    "is_constant",
    "mode_read",
    "n_params",
    "open_checkpoint",
    "parse_json",
    "published_architecture",
    "read_json",
    "read_json_object",
    "renamed_when_whole",
    "require_config",
    "restore_numbers",
    "sha256_of_file",
    "tensor_shapes",
    "to_json",
    "unfolded_architecture",
    "write_json",
    "write_safetensors",
]
