"""What a snapshot holds, and the bytes that stand for it."""

from lockstep.snapshots.format.canonical_json import Limits as Limits, dumps as dumps
from lockstep.snapshots.format.content import (
    Content as Content,
    Parent as Parent,
    training_of as training_of,
    without_sources as without_sources,
)
from lockstep.snapshots.format.layout import (
    ABOUT as ABOUT,
    DAMAGED as DAMAGED,
    FOLDER as FOLDER,
    LOCK as LOCK,
    MANIFEST as MANIFEST,
    STATE as STATE,
    TEMPORARY as TEMPORARY,
    folder_name as folder_name,
    model_file as model_file,
    update_of as update_of,
)
from lockstep.snapshots.format.manifest import (
    FileEntry as FileEntry,
    Manifest as Manifest,
    ModelEntry as ModelEntry,
    read_manifest as read_manifest,
)
from lockstep.snapshots.format.tensor_file import (
    DTYPES as DTYPES,
    TensorInfo as TensorInfo,
    dtype_name as dtype_name,
    file_order as file_order,
    header as header,
)
from lockstep.snapshots.format.tree import (
    TensorIndex as TensorIndex,
    decode as decode,
    encode as encode,
    freeze as freeze,
)
