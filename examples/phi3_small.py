"""A model with the attention of Phi-3-small: `attn-ops run --model examples/phi3_small.py`.

Every second layer sees all keys. The others see the last blocks, and of those before one in
`blocksparse_vert_stride`, which moves from head to head. `PUBLISHED` has the sizes and the pattern
of Phi-3-small (7B, random weights): `attn-ops run --model examples/phi3_small.py:PUBLISHED`. The
rest of a layer is Llama's, not Phi-3-small's.
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from attn_ops.block_layout import BlocksparseParams, BlockTables, dense_mask, local_strided

PUBLISHED = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=100352,
    max_position_embeddings=8192,
    blocksparse_block_size=64,
    blocksparse_num_local_blocks=16,
    blocksparse_vert_stride=8,
    blocksparse_homo_head_pattern=False,
    dense_attention_every_n_layers=2,
    dtype="bfloat16",
)
CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    max_position_embeddings=1024,
    blocksparse_block_size=16,
    blocksparse_num_local_blocks=2,
    blocksparse_vert_stride=4,
    blocksparse_homo_head_pattern=False,
    dense_attention_every_n_layers=2,
    dtype="float32",
)
"""Small enough for a CPU, with a pattern that leaves blocks out of prompts of 200 tokens."""


class BlocksparseAttention(LlamaAttention):
    """Llama's attention over the blocks of a layout; attn_ops reads it from `blocksparse`.

    Raises:
        ValueError: attn_implementation is another than attn_ops or, as a reference, eager.
    """

    def __init__(self, config: LlamaConfig, layer_idx: int, tables: BlockTables) -> None:
        super().__init__(config, layer_idx)
        self.blocksparse = tables

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        implementation = self.config._attn_implementation
        if implementation not in ("attn_ops", "eager"):  # others would see all blocks
            raise ValueError(f"attn_implementation must be attn_ops or eager, got {implementation}")
        if implementation == "eager":
            if attention_mask is None:
                raise ValueError("attention_mask must be a tensor with eager attention, got None")
            seen = dense_mask(
                self.blocksparse.layout, hidden_states.shape[1], attention_mask.shape[-1]
            )
            least = torch.finfo(attention_mask.dtype).min
            hidden = ~seen.to(attention_mask.device)
            attention_mask = attention_mask.masked_fill(hidden, least)
        return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)


class Phi3SmallLike(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        params = BlocksparseParams(
            max_seqlen=config.max_position_embeddings,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            block_size=config.blocksparse_block_size,
            local_blocks=config.blocksparse_num_local_blocks,
            vert_stride=config.blocksparse_vert_stride,
            homo_head=config.blocksparse_homo_head_pattern,
        )
        tables = BlockTables(local_strided(params))  # one for all layers
        for index, layer in enumerate(self.model.layers):
            if (index + 1) % config.dense_attention_every_n_layers:
                layer.self_attn = BlocksparseAttention(config, index, tables)
        self.post_init()


MODEL = Phi3SmallLike
