"""Parts of the GPT examples apart from training with pccl: the model, the text, the table of losses."""
