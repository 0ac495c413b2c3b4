"""The parts of the GPT examples that do not use pccl: the model, the text, the table of losses."""
