"""Conversion to and from Hugging Face model folders: ``fmoe export`` and ``fmoe import``.

`family` defines a family of models, and `tensors` the mapping of its tensors to ours; `llama` has families,
`families` their list; `configs` converts config.json; `outgoing` exports, `incoming` imports; `llama_cpp` writes GGUF
files.

`transfer` is ``fmoe checkpoint export`` and ``import``, under our own names: `dcp` reads and writes folders of
torch.distributed.checkpoint, whose pickles `pickled` parses; `megatron` has Megatron-core's names of tensors.
"""

from pretrain.interchange.families import FAMILIES
from pretrain.interchange.incoming import import_folder
from pretrain.interchange.outgoing import export_checkpoint

__all__ = ["FAMILIES", "export_checkpoint", "import_folder"]
