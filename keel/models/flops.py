"""Floating-point operations of a pass through a model, from its shapes: what the work needs, not what a kernel does."""

from collections.abc import Iterable
from dataclasses import dataclass

from keel.models.roles import Role, Roles


@dataclass(frozen=True)
class Products:
    """Matrix products of one role's model; numbers are weights that each token is multiplied by.

    linear: of the trunk, embeddings left out (they are looked up). unembedding: V x H. adapter: of the role's adapter,
    0 where all weights are its own. attention: layers x heads x head width, for the products with keys and with values.
    Every weight is counted for every token, so that a mixture of experts is counted too high.
    """

    linear: int
    unembedding: int
    adapter: int
    attention: int

    def forward(self, lengths: Iterable[int], unembedded: int) -> float:
        """Of one forward pass over sequences of these lengths, `unembedded` of whose tokens get logits.

            2 * (linear + adapter) * tokens + 2 * V * H * unembedded + 4 * attention * keys

        keys: tokens that are looked at, length * (length + 1) / 2 a sequence [arXiv:2001.08361, section 2.1, with
        causal attention counted by half].
        """
        return self._of(lengths, unembedded, 2.0, 2.0)

    def training(self, lengths: Iterable[int], unembedded: int) -> float:
        """Of a forward and a backward pass: 6 for each 2 above where weights are trained. Frozen ones below an adapter
        cost 4: their own gradient is not needed. What a backward pass computes again is not counted."""
        return self._of(lengths, unembedded, 4.0 if self.adapter else 6.0, 6.0)

    def _of(self, lengths: Iterable[int], unembedded: int, base: float, own: float) -> float:
        lengths = list(lengths)
        tokens, keys = sum(lengths), sum(n * (n + 1) / 2 for n in lengths)
        weights = base * (self.linear * tokens + self.unembedding * unembedded) + own * self.adapter * tokens
        return weights + 2 * own * self.attention * keys


def products_of(roles: Roles, role: Role) -> Products:
    """Counted on the role's model, which is in force afterwards."""
    model = roles.model(role)
    config, embedding = model.config.get_text_config(), model.get_input_embeddings().weight
    trunk = {name: p for name, p in model.base_model.named_parameters() if p.dim() == 2 and p is not embedding}
    heads: int = config.num_attention_heads
    width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Products(
        sum(p.numel() for name, p in trunk.items() if "lora_" not in name),
        config.vocab_size * config.hidden_size,
        sum(p.numel() for name, p in roles.parameters(role).items() if "lora_" in name),
        config.num_hidden_layers * heads * width,
    )
