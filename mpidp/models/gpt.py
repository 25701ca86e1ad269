"""A small GPT: a transformer that predicts the next token.

The architecture is the pre-norm transformer decoder of GPT-2 (Radford et al. 2019): learned positions, causal
self-attention, GELU, output weights tied to the embedding (Press and Wolf 2017), and residual branches whose
last layer starts smaller by sqrt(2 * layers).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)); (batch, time, width) in and out."""

    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> the same shape; a time step sees itself and earlier ones only."""
        x = x + self._drop(self.attention_out(self._attend(self.attention_norm(x))))
        return x + self._drop(self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        # unflatten with the head width named (never -1): a batch of 0 samples leaves -1 undefined.
        head_width = x.shape[-1] // self.heads
        query, key, value = (
            part.unflatten(-1, (self.heads, head_width)).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """A decoder-only transformer; see `gpt` for its sizes."""

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}: choose width = heads * n")
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = dropout
        self.blocks = nn.ModuleList(Block(heads, width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # biases and norms keep torch's start
            scale = (2 * layers) ** -0.5 if name.endswith("_out.weight") else 1.0
            nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Integer tokens (batch, time <= context) -> scores of the next token (batch, time, vocabulary)."""
        time = tokens.shape[1]
        if time > self.context:
            raise ValueError(f"{time} tokens are more than the context of {self.context}")
        position = torch.arange(time, device=tokens.device)
        x = functional.dropout(self.token(tokens) + self.position(position), self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.token.weight)

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, length: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Continue `prompt` (batch, time >= 1; int64) by `length` sampled tokens; (batch, time + length).

        A `temperature` of 0 takes the most likely token each time. Only the last `context` tokens are seen.
        """
        training = self.training
        self.eval()
        tokens = prompt
        for _ in range(length):
            scores = self(tokens[:, -self.context :])[:, -1]
            if temperature == 0:
                following = scores.argmax(-1, keepdim=True)
            else:
                chances = (scores / temperature).softmax(-1)
                following = torch.multinomial(chances, 1, generator=generator)
            tokens = torch.cat((tokens, following), dim=1)
        self.train(training)
        return tokens


def gpt(
    vocabulary: int = 256, context: int = 128, layers: int = 4, heads: int = 4, width: int = 128, dropout: float = 0.0
) -> GPT:
    """A small GPT; the defaults (0.84 M parameters) learn from bytes. Weights follow torch's random state.

    Args:
        vocabulary: number of different tokens; 256 for bytes.
        context: most tokens that are seen at once.
        layers: number of blocks.
        heads: attention heads of a block; divides `width`.
        width: values of one token inside the model.
        dropout: share of values dropped while training.

    Raises:
        ValueError: `width` is not a multiple of `heads`.
    """
    return GPT(vocabulary, context, layers, heads, width, dropout)
