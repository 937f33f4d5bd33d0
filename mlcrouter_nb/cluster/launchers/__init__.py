"""How engines come to be: `cpu` starts ours, `attach` takes those that run, `mlc` will start MLC-LLM's."""
