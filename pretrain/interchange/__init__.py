"""Conversion to and from Hugging Face model folders: ``fmoe export`` and ``fmoe import``.

`family` describes a family of models, and `tensors` maps its tensors to ours. `llama`, `deepseek`, `t5` and others
define families, which `families` lists. `configs` converts config.json, `outgoing` exports, `incoming` imports, and
`llama_cpp` writes GGUF files.

`transfer` is ``fmoe checkpoint export`` and ``import``, which keep fmoe's tensor names: `dcp` reads and writes folders
of torch.distributed.checkpoint, whose pickles `pickled` parses; `megatron` renames the tensors of Megatron-core.
"""

from pretrain.interchange.families import FAMILIES
from pretrain.interchange.incoming import import_folder
from pretrain.interchange.outgoing import export_checkpoint

__all__ = ["FAMILIES", "export_checkpoint", "import_folder"]
