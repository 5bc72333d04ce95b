"""The four roles of PPO, whatever backbone holds them, and the passes that training makes through them.

A pass goes over sequences (prompt + response) right-padded. A causal model never looks right, so padding changes no
real token and a row does not depend on its batch mates. What is predicted at response token t comes from the hidden
state one position before it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from keel.algo.logprobs import exact_kl, token_logprobs
from keel.data.encode import micro_batches, pad_sequences
from keel.errors import ModelError
from keel.models.decoder import covers, packed_hidden, shared_hidden
from keel.models.heads import ScalarHead
from keel.models.loading import unembedding
from keel.models.side_by_side import side_by_side
from keel.types import TokenSequence

Role = Literal["policy", "reference", "critic", "reward"]
R = TypeVar("R")

HEADED: tuple[Role, ...] = ("critic", "reward")


class Roles(Protocol):
    """What a backbone offers. Only the roles that it was built with can be asked for."""

    device: torch.device
    trainable: frozenset[Role]

    def has(self, role: Role) -> bool:
        """Whether the role was built."""
        ...

    def model(self, role: Role) -> PreTrainedModel:
        """The causal language model with that role's weights in force, until the next call."""
        ...

    def head(self, role: Role) -> ScalarHead:
        """The scalar head of critic or reward model."""
        ...

    def parameters(self, role: Role) -> dict[str, nn.Parameter]:
        """The weights that are this role's own (adapter or model, and head), by name."""
        ...

    def workers(self, role: Role) -> int:
        """How many parts of a batch may pass through the role at once (`side_by_side.workers_for`)."""
        ...

    def rest(self) -> None:
        """Ends the use of frozen roles for now: where the backbone lets them rest they need no memory until the next
        `model`. What a role computes is the same before and after."""
        ...

    def fingerprint(self, role: Role) -> str:
        """SHA-256 of all weights that make this role's outputs."""
        ...

    def export(self, role: Role, folder: Path) -> None:
        """Writes the role's causal language model as a plain Hugging Face folder (adapters merged)."""
        ...


def response_hidden(model: PreTrainedModel, ids_BS: Tensor, response_mask_BS: Tensor) -> Tensor:
    """Hidden states that predict the response tokens, row by row: [N, H], N the number of response tokens."""
    return hidden_at(model, ids_BS, response_mask_BS.roll(-1, 1))


def hidden_at(model: PreTrainedModel, ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
    """Last hidden states of the tokens that are asked for, row by row: [N, H]. Only what they need is computed, where
    the architecture lets it."""
    if covers(model):
        return packed_hidden(model, ids_BS, wanted_BS)
    return model.base_model(input_ids=ids_BS, use_cache=False).last_hidden_state[wanted_BS]


def micro_logprobs(
    roles: Roles, role: Role, ids_BS: Tensor, response_mask_BS: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every response token of one micro-batch, packed: [N], [N], float32, nats."""
    model = roles.model(role)
    hidden_NH = response_hidden(model, ids_BS, response_mask_BS)
    return token_logprobs(hidden_NH, *unembedding(model), ids_BS[response_mask_BS], temperature)


def micro_policy(
    roles: Roles, ids_BS: Tensor, response_mask_BS: Tensor, temperature: float, exact: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The policy's `micro_logprobs`, and its exact KL to the reference per token if asked (gradient to the policy)."""
    if not exact:
        return *micro_logprobs(roles, "policy", ids_BS, response_mask_BS, temperature), None
    with torch.no_grad():  # first: on a shared base the roles take turns
        reference = roles.model("reference")
        ref_hidden_NH = response_hidden(reference, ids_BS, response_mask_BS)
        ref_weights = unembedding(reference)
    model = roles.model("policy")
    hidden_NH, weights = response_hidden(model, ids_BS, response_mask_BS), unembedding(model)
    pair = token_logprobs(hidden_NH, *weights, ids_BS[response_mask_BS], temperature)
    kl_N = exact_kl(hidden_NH, *weights, ref_hidden_NH, *ref_weights, temperature)
    return *pair, kl_N


def unpacked(x_N: Tensor, response_mask_BT: Tensor) -> Tensor:
    """Packed response tokens back in their rows: [B, T], 0 outside the mask."""
    return torch.zeros_like(response_mask_BT, dtype=x_N.dtype).masked_scatter(response_mask_BT, x_N)


def micro_values(roles: Roles, ids_BS: Tensor, response_mask_BS: Tensor) -> Tensor:
    """The critic's value before each response token of one micro-batch, packed: [N], float32, reward."""
    return roles.head("critic")(response_hidden(roles.model("critic"), ids_BS, response_mask_BS))


def micro_scores(roles: Roles, ids_BS: Tensor, lengths_B: Tensor, role: Role = "reward") -> Tensor:
    """The head's output at the last real token of each row: [B], float32."""
    last_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device) == lengths_B.to(ids_BS.device)[:, None] - 1
    return roles.head(role)(hidden_at(roles.model(role), ids_BS, last_BS))


def micro_group_scores(
    roles: Roles, groups: Sequence[Sequence[TokenSequence]], pad_id: int, role: Role = "reward"
) -> Tensor:
    """`micro_scores` of groups of responses, group after group, each group's prompt passed through the model once.

    The sequences of a group must share their prompt. The responses read the prompt's keys and values, and gradients
    flow through them. With K responses to a prompt that is half the work and less.
    """
    model = roles.model(role)
    of_B = torch.repeat_interleave(torch.tensor([len(group) for group in groups]))
    if not covers(model) and model.is_activation_checkpointing:  # which transformers does without a cache
        ids_BS, _, lengths_B = pad_sequences([s for group in groups for s in group], pad_id)
        return micro_scores(roles, ids_BS.to(roles.device), lengths_B, role)
    if not covers(model) or any(len(group[0].prompt_ids) < 2 for group in groups):
        return roles.head(role)(_cached_hidden(model, groups, of_B, pad_id))
    # The prompt's last token stands with the responses: something must begin the row of an empty one.
    prompts = [torch.tensor(group[0].prompt_ids[:-1]) for group in groups]
    ends = [TokenSequence(s.prompt_ids[-1:] + s.response_ids, ()) for group in groups for s in group]
    ids_BS, _, lengths_B = pad_sequences(ends, pad_id)
    last_BS = torch.arange(ids_BS.shape[1]) == lengths_B[:, None] - 1
    return roles.head(role)(shared_hidden(model, prompts, of_B, ids_BS, last_BS))


def _cached_hidden(
    whole: PreTrainedModel, groups: Sequence[Sequence[TokenSequence]], of_B: Tensor, pad_id: int
) -> Tensor:
    """Hidden state of each sequence's last token, by the model's own pass: [B, H]."""
    model, device = whole.base_model, whole.device
    prompts = [TokenSequence(group[0].prompt_ids, ()) for group in groups]
    answers = [TokenSequence(s.response_ids, ()) for group in groups for s in group]
    prompt_ids_PS, _, prompt_lengths_P = pad_sequences(prompts, pad_id)
    ids_BT, _, lengths_B = pad_sequences(answers, pad_id)
    seen_PS = torch.arange(prompt_ids_PS.shape[1]) < prompt_lengths_P[:, None]
    cache = DynamicCache(config=whole.config)
    model(input_ids=prompt_ids_PS.to(device), attention_mask=seen_PS.to(device), cache=cache, use_cache=True)
    cache.batch_select_indices(of_B.to(device))
    hidden_BTH = model(
        input_ids=ids_BT.to(device),
        attention_mask=torch.cat([seen_PS[of_B], torch.arange(ids_BT.shape[1]) < lengths_B[:, None]], 1).to(device),
        position_ids=(prompt_lengths_P[of_B][:, None] + torch.arange(ids_BT.shape[1])).to(device),
        cache=cache,
        use_cache=True,
    ).last_hidden_state
    return hidden_BTH[torch.arange(len(lengths_B), device=device), lengths_B.to(device) - 1]


def logprobs_BT(
    roles: Roles, role: Role, sequences: Sequence[TokenSequence], temperature: float, pad_id: int, micro_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of response tokens, [B, T] float32 on the CPU, 0 outside the response."""

    def both(ids_BS: Tensor, mask_BS: Tensor) -> Tensor:
        return torch.stack(micro_logprobs(roles, role, ids_BS, mask_BS, temperature))

    logprobs, entropy = _over_responses(roles, role, sequences, pad_id, micro_tokens, both)
    return logprobs, entropy


def exact_kl_BT(
    roles: Roles, sequences: Sequence[TokenSequence], temperature: float, pad_id: int, micro_tokens: int
) -> Tensor:
    """KL(policy || reference) over the whole vocabulary at each response token: [B, T] nats, 0 outside the response."""

    def kl(ids_BS: Tensor, mask_BS: Tensor) -> Tensor:
        kl_N = micro_policy(roles, ids_BS, mask_BS, temperature, exact=True)[2]
        assert kl_N is not None
        return kl_N[None]

    return _over_responses(roles, "policy", sequences, pad_id, micro_tokens, kl)[0]


def values_BT(
    roles: Roles, sequences: Sequence[TokenSequence], pad_id: int, micro_tokens: int
) -> tuple[Tensor, Tensor]:
    """The critic's values before each response token [B, T], 0 outside, and after the last one [B] (for bootstrap)."""
    width = max(len(s.response_ids) for s in sequences)
    values, last = torch.zeros(len(sequences), width), torch.zeros(len(sequences))
    model, head = roles.model("critic"), roles.head("critic")

    def work(rows: list[int]) -> tuple[Tensor, Tensor]:
        some = [sequences[i] for i in rows]
        ids_BS, mask_BS, lengths_B = pad_sequences(some, pad_id)
        last_BS = torch.arange(ids_BS.shape[1]) == lengths_B[:, None] - 1
        wanted_BS = mask_BS.roll(-1, 1) | last_BS
        values_N = head(hidden_at(model, ids_BS.to(roles.device), wanted_BS.to(roles.device))).cpu()
        last_N = last_BS[wanted_BS]
        block = torch.zeros(len(rows), width)
        block[_response_places(some, width)] = values_N[~last_N]
        return block, values_N[last_N]

    for rows, out in _each_part(roles, "critic", sequences, micro_tokens, work):
        values[rows], last[rows] = out
    return values, last


def scores_B(
    roles: Roles, sequences: Sequence[TokenSequence], pad_id: int, micro_tokens: int, role: Role = "reward"
) -> Tensor:
    """The reward model's score of each sequence: [B] float32 on the CPU."""
    out = torch.zeros(len(sequences))

    def work(rows: list[int]) -> Tensor:
        ids_BS, _, lengths_B = pad_sequences([sequences[i] for i in rows], pad_id)
        return micro_scores(roles, ids_BS.to(roles.device), lengths_B, role).cpu()

    for rows, scores in _each_part(roles, role, sequences, micro_tokens, work):
        out[rows] = scores
    return out


def _over_responses(
    roles: Roles,
    role: Role,
    sequences: Sequence[TokenSequence],
    pad_id: int,
    micro_tokens: int,
    numbers: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """[count, B, T] on the CPU from a function of micro-batches (ids_BS, response_mask_BS) -> [count, N]."""
    width = max(len(s.response_ids) for s in sequences)

    def work(rows: list[int]) -> Tensor:
        some = [sequences[i] for i in rows]
        ids_BS, mask_BS, _ = pad_sequences(some, pad_id)
        out = numbers(ids_BS.to(roles.device), mask_BS.to(roles.device)).cpu()
        block = torch.zeros(len(out), len(rows), width)
        block[:, _response_places(some, width)] = out
        return block

    parts = list(_each_part(roles, role, sequences, micro_tokens, work))
    whole = torch.zeros(len(parts[0][1]), len(sequences), width)
    for rows, block in parts:
        whole[:, rows] = block
    return whole


def _each_part(
    roles: Roles, role: Role, sequences: Sequence[TokenSequence], micro_tokens: int, work: Callable[[list[int]], R]
) -> Iterator[tuple[list[int], R]]:
    """Row numbers of each micro-batch with what `work` makes of them, without gradient."""
    workers = roles.workers(role)
    parts = micro_batches(lengths_with_kin(sequences), micro_tokens, workers)
    return zip(parts, side_by_side(torch.inference_mode()(work), parts, workers), strict=True)


def lengths_with_kin(sequences: Sequence[TokenSequence]) -> list[int]:
    """Tokens of the longest sequence with the same prompt, for each: micro-batches by it keep such sequences together,
    and the pass through the model shares their prompt."""
    longest: dict[tuple[int, ...], int] = {}
    for s in sequences:
        longest[s.prompt_ids] = max(len(s), longest.get(s.prompt_ids, 0))
    return [longest[s.prompt_ids] for s in sequences]


def _response_places(sequences: Sequence[TokenSequence], width: int) -> Tensor:
    """Where the response tokens of each stand in [B, width]; gaps are left out."""
    lengths = torch.tensor([len(s.response_ids) for s in sequences])
    places_BT = torch.arange(width) < lengths[:, None]
    for row, s in enumerate(sequences):
        if s.response_mask is not None:
            places_BT[row, : len(s.response_ids)] = torch.tensor(s.response_mask)
    return places_BT


def checkpoint_tensors(roles: Roles) -> dict[str, Tensor]:
    """Every weight that training changes, by `role/name`, on the CPU."""
    return {
        f"{role}/{name}": parameter.detach().cpu().contiguous()
        for role in sorted(roles.trainable)
        for name, parameter in roles.parameters(role).items()
    }


@torch.no_grad()
def restore_tensors(roles: Roles, tensors: Mapping[str, Tensor]) -> None:
    """Puts back what `checkpoint_tensors` gave. Raises ModelError where a weight is missing, unexpected or of another
    shape or dtype; then none has changed."""
    own = {f"{role}/{name}": p for role in roles.trainable for name, p in roles.parameters(role).items()}
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    other = [
        n for n in own.keys() & tensors.keys() if (own[n].shape, own[n].dtype) != (tensors[n].shape, tensors[n].dtype)
    ]
    if missing or unknown or other:
        named = ", ".join([*missing, *unknown, *sorted(other)][:4])
        raise ModelError(
            f"{len(missing)} weights are missing, {len(unknown)} unknown, {len(other)} of another shape: {named}",
            remedy="go on with the model and settings that the run was started with",
        )
    for name, parameter in own.items():
        parameter.copy_(tensors[name])
