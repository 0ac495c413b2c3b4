"""Parts that the GPT examples share, and no part of training with pccl: the model, the text, the table of losses."""
