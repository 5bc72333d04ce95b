"""A key-value cache that is written in place, not copied at every step."""

from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):
    """A full-attention layer's cache inside one buffer of the final length."""

    def __init__(self, limit: int):
        """limit: tokens of prompt and response together, at most."""
        super().__init__()
        self.limit, self.length = limit, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Appends [B, heads, n, width] and returns views of all that is held."""
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            rows, heads, _, width = key_states.shape
            self.key_buffer = key_states.new_empty(rows, heads, self.limit, width)
            self.value_buffer = value_states.new_empty(rows, heads, self.limit, value_states.shape[-1])
            self.is_initialized = True
        end = self.length + key_states.shape[-2]
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        self.length = end
        self.keys, self.values = self.key_buffer[:, :, :end], self.value_buffer[:, :, :end]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the given rows, each as often as it is given."""
        self.key_buffer, self.value_buffer = (
            self._rows(self.key_buffer, indices),
            self._rows(self.value_buffer, indices),
        )
        self.keys, self.values = self.key_buffer[:, :, : self.length], self.value_buffer[:, :, : self.length]

    def _rows(self, buffer: Tensor, indices: Tensor) -> Tensor:
        kept = buffer.new_empty(len(indices), *buffer.shape[1:])
        kept[:, :, : self.length] = buffer[indices, :, : self.length]
        return kept


def growing_cache(config: PretrainedConfig, limit: int) -> DynamicCache:
    """The cache that transformers would make for this model, its full-attention layers written in place."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer(limit) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    assert all(hasattr(layer, "batch_select_indices") for layer in cache.layers), (
        "finished rows cannot leave this cache"
    )
    return cache


def select_rows(cache: DynamicCache, rows: Tensor) -> None:
    """Keeps the given rows of every layer, each as often as it is given."""
    for layer in cache.layers:
        layer.batch_select_indices(rows)  # type: ignore[attr-defined]
