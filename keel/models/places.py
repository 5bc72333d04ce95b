"""Where the packed tokens of a micro-batch stand in its rows, and attention among them.

Attention alone needs to know of rows: norms, products and activations see each token by itself.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Places(NamedTuple):
    """Where the tokens of a micro-batch stand: N packed tokens, row by row, of B rows of up to S tokens.

    column_N: place in its row. flat_N: place in the padded [B * S]; None where nothing is padded. wanted_M: packed
    numbers of the tokens that are asked for; None for all. query_M: their places in a padded [B * Q] of the wanted
    alone; seen_BQS: which tokens each of those may attend to, None where that is all up to itself.
    """

    rows: int
    width: int
    queries: int
    column_N: Tensor
    flat_N: Tensor | None
    wanted_M: Tensor | None
    query_M: Tensor | None
    seen_BQS: Tensor | None

    @classmethod
    def of(cls, wanted_BS: Tensor) -> tuple["Places", Tensor]:
        """From the tokens that are asked for; also which tokens are needed for them, [B, S], to pack others alike. Rows
        of which nothing is asked for are in neither."""
        counts_B = wanted_BS.sum(1)
        needed_BS = wanted_BS.flip(1).cumsum(1).flip(1) > 0
        wanted_BS, needed_BS = wanted_BS[counts_B > 0], needed_BS[counts_B > 0]
        counts_B, lengths_B = counts_B[counts_B > 0], needed_BS.sum(1)
        width = int(lengths_B.max())
        needed_BS, wanted_BS = needed_BS[:, :width], wanted_BS[:, :width]
        row_N, column_N = needed_BS.nonzero(as_tuple=True)
        rows, full = len(counts_B), len(row_N) == needed_BS.numel()
        flat_N = None if full else row_N * width + column_N
        chosen_N = wanted_BS[row_N, column_N]
        if bool(chosen_N.all()):
            return cls(rows, width, width, column_N, flat_N, None, flat_N, None), needed_BS
        wanted_M = chosen_N.nonzero().squeeze(1)
        queries = int(counts_B.max())
        within_M = torch.arange(len(wanted_M)) - (counts_B.cumsum(0) - counts_B).repeat_interleave(counts_B)
        query_M = row_N[wanted_M] * queries + within_M
        last_BQ = torch.zeros(rows * queries, dtype=torch.long)
        last_BQ[query_M] = column_N[wanted_M]
        seen_BQS = torch.arange(width) <= last_BQ.view(rows, queries, 1)
        return cls(rows, width, queries, column_N, flat_N, wanted_M, query_M, seen_BQS), needed_BS

    def attend(self, query_MO: Tensor, key_NO: Tensor, value_NO: Tensor, last: bool, width: int) -> Tensor:
        """Causal attention of packed queries to the keys of their row: [M, heads * width].

        last: the queries are those of the wanted tokens alone, as in the last layer.
        """
        key, value = self.padded(key_NO, width), self.padded(value_NO, width)
        return self.among(query_MO, key, value, self.seen_BQS if last else None, last, width)

    def padded(self, x_NO: Tensor, width: int) -> Tensor:
        """[N, heads * width] -> [B, heads, S, width]."""
        return _padded(x_NO, self.flat_N, self.rows, self.width, width)

    def among(
        self, query_MO: Tensor, key: Tensor, value: Tensor, seen_BQS: Tensor | None, last: bool, width: int
    ) -> Tensor:
        """Attention to padded keys, of which seen_BQS may be seen; None: those up to each query."""
        flat_M, queries = (self.query_M, self.queries) if last else (self.flat_N, self.width)
        query = _padded(query_MO, flat_M, self.rows, queries, width)
        seen = None if seen_BQS is None else seen_BQS[:, None]
        out = F.scaled_dot_product_attention(
            query, key, value, seen, is_causal=seen is None, enable_gqa=query.shape[1] != key.shape[1]
        )
        out_NO = out.transpose(1, 2).reshape(self.rows * queries, -1)
        return out_NO if flat_M is None else out_NO[flat_M]


class SharedPlaces(NamedTuple):
    """As `Places`, where several rows begin with the same tokens: those are packed once, before all rows.

    beginnings: of them, G. rows: of what follows, B. of_B: which beginning a row has. column_N: place of each packed
    token in its whole row. wanted_M: packed numbers of the tokens that are asked for, all of them in rows. seen_BSS,
    seen_BQS: which tokens, of the padded beginning and then of the row, may be seen by each token of a row, and by each
    wanted one.
    """

    beginnings: Places
    rows: Places
    of_B: Tensor
    column_N: Tensor
    wanted_M: Tensor
    seen_BSS: Tensor
    seen_BQS: Tensor

    @classmethod
    def of(cls, lengths_G: Tensor, of_B: Tensor, wanted_BS: Tensor) -> tuple["SharedPlaces", Tensor]:
        """From the lengths of the beginnings and the tokens that are asked for, at least one in each row; also which
        tokens of the rows are needed, as `Places.of`."""
        beginning_GP = torch.arange(int(lengths_G.max())) < lengths_G[:, None]
        beginnings, _ = Places.of(beginning_GP)
        rows, needed_BS = Places.of(wanted_BS)
        before, count = len(beginnings.column_N), len(rows.column_N)
        column_BS = lengths_G[of_B][:, None] + torch.arange(rows.width)
        wanted_M = torch.arange(count) if rows.wanted_M is None else rows.wanted_M
        causal_BSS = torch.ones(rows.width, rows.width, dtype=torch.bool).tril().expand(rows.rows, -1, -1)
        seen = [
            torch.cat([beginning_GP[of_B][:, None].expand(-1, own_BQS.shape[1], -1), own_BQS], 2)
            for own_BQS in (causal_BSS, causal_BSS if rows.seen_BQS is None else rows.seen_BQS)
        ]
        column_N = torch.cat([beginnings.column_N, column_BS[needed_BS]])
        return cls(beginnings, rows, of_B, column_N, before + wanted_M, *seen), needed_BS

    def attend(self, query_MO: Tensor, key_NO: Tensor, value_NO: Tensor, last: bool, width: int) -> Tensor:
        """See `Places.attend`. The beginnings' keys are read by all rows that have them; gradients flow to them."""
        count = (len(self.beginnings.column_N),)
        (first_PO, key_NO), (second_PO, value_NO) = key_NO.tensor_split(count), value_NO.tensor_split(count)
        begun_key, begun_value = self.beginnings.padded(first_PO, width), self.beginnings.padded(second_PO, width)
        key = torch.cat([begun_key[self.of_B], self.rows.padded(key_NO, width)], 2)
        value = torch.cat([begun_value[self.of_B], self.rows.padded(value_NO, width)], 2)
        if last:
            return self.rows.among(query_MO, key, value, self.seen_BQS, True, width)
        query_PO, query_MO = query_MO.tensor_split(count)
        begun_PO = self.beginnings.among(query_PO, begun_key, begun_value, None, False, width)
        return torch.cat([begun_PO, self.rows.among(query_MO, key, value, self.seen_BSS, False, width)])


def _padded(x_NO: Tensor, flat_N: Tensor | None, rows: int, tokens: int, width: int) -> Tensor:
    """Packed tokens as [rows, heads, tokens, width]."""
    if flat_N is not None:
        x_NO = x_NO.new_zeros(rows * tokens, x_NO.shape[1]).index_copy(0, flat_N, x_NO)
    return x_NO.view(rows, tokens, -1, width).transpose(1, 2)
