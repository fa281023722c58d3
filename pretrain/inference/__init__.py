"""Use of a trained model: generate text with it, evaluate it on text. One process reads a checkpoint of any split;
nothing is written.

`load.open_run` finds and checks a checkpoint, `load.single_process` and `load.load_model` build its model, a module in
evaluation mode that `evaluation.evaluate` and `decoding.generate` take.
"""
