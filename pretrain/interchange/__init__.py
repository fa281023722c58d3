"""Conversion to and from Hugging Face model folders: ``fmoe export`` and ``fmoe import``.

A family is a format of config.json and tensors, such as Mixtral's. `family` and `tensors` have the classes that
describe one. Each module of `families` defines one or more families, and `families` lists them all.
`outgoing` exports, `incoming` imports, `configs` converts config.json, `card` writes model cards, `hub` uploads them
with the model, and `llama_cpp` writes GGUF files.

`transfer` is ``fmoe checkpoint export`` and ``fmoe checkpoint import``, which keep fmoe's tensor names. `dcp` reads and
writes folders of torch.distributed.checkpoint, and `pickled` reads the pickles in them. `megatron` renames the tensors
of Megatron-core's checkpoints.
"""

from pretrain.interchange.families import FAMILIES
from pretrain.interchange.incoming import import_folder
from pretrain.interchange.outgoing import export_checkpoint

__all__ = ["FAMILIES", "export_checkpoint", "import_folder"]
