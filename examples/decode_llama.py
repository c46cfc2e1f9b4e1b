"""Decode with a Llama of random weights: `python examples/decode_llama.py`, on a CPU or a GPU."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import graphs
from attn_ops.integrations import transformers as integration
from attn_ops.integrations.merged import merge_projections


def main() -> None:
    integration.register()
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="attn_ops").eval()
    if torch.cuda.is_available():
        model = model.cuda().bfloat16()
    merge_projections(model)
    compiled = torch.compile(model, backend="attn_ops", fullgraph=True)
    session = graphs.DecodeSession(compiled, max_batch_size=4, max_tokens=256)
    prompts = [[1, 2, 3], [4], [5, 6]]
    # eos=(): nothing that a model of random weights writes means an end.
    for result in session.generate(prompts, max_new_tokens=16, temperature=1.0, eos=()):
        print(result.finish_reason, result.token_ids)
    print(session.graph_mode.name, session.graph_mode_why, session.num_steps)


if __name__ == "__main__":
    main()
