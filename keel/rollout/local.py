"""The in-process sampler: the policy's own weights, a cache written in place, finished rows leave the batch."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.algo.precision import project
from keel.data.encode import Encoder
from keel.models.loading import unembedding
from keel.models.roles import Role, Roles
from keel.models.side_by_side import side_by_side
from keel.rollout.cache import growing_cache, select_rows
from keel.rollout.choose import choose
from keel.rollout.engine import Sampling
from keel.rollout.llama import LlamaStep, supports
from keel.rollout.noise import sample_keys, uniforms
from keel.types import Finish, Prompt, Rollouts

COMPACT_BELOW = 0.75
"""Finished rows leave the batch when fewer than this share of its rows still runs: each leaving copies the cache."""

ROWS_PER_WORKER = 64
"""With fewer rows each, workers wait for each other and the interpreter more than they gain (docs/decisions.md)."""


class LocalEngine:
    """Samples from one role's weights as they are at that moment: there is nothing to synchronise."""

    def __init__(self, roles: Roles, encoder: Encoder, role: Role = "policy"):
        self.roles, self.encoder = roles, encoder
        self.role: Role = role

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        seed: int,
        step: int,
        version: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> Rollouts:
        """See `engine.Engine`."""
        prompt_ids = [self.encoder.prompt_ids(prompt) for prompt in prompts]
        keys = sample_keys(seed, step, np.arange(len(prompts)))
        ids_BT = torch.zeros(len(prompts), sampling.max_tokens, dtype=torch.long)
        logprobs_BT = torch.zeros(len(prompts), sampling.max_tokens)
        lengths_B = torch.zeros(len(prompts), dtype=torch.long)
        stopped_B = torch.zeros(len(prompts), dtype=torch.bool)
        model = self.roles.model(self.role)
        workers = self.roles.workers(self.role)
        order = sorted(range(len(prompts)), key=lambda i: (len(prompt_ids[i]), prompt_ids[i]))  # equal ones adjacent
        at_once = max(1, min(workers, len(order) // ROWS_PER_WORKER))
        size = max(1, min(sampling.rows, -(-len(order) // at_once)))
        chunks = [order[start : start + size] for start in range(0, len(order), size)]
        done = 0
        for rows, out in zip(
            chunks,
            side_by_side(
                lambda rows: self._decode(model, [prompt_ids[i] for i in rows], keys[rows], sampling), chunks, workers
            ),
            strict=True,
        ):
            ids_BT[rows], logprobs_BT[rows], lengths_B[rows], stopped_B[rows] = out
            done += len(rows)
            if progress:
                progress(done)
        width = max(1, int(lengths_B.max()))
        mask_BT = torch.arange(width) < lengths_B[:, None]
        finish: list[Finish] = ["stop" if stopped else "length" for stopped in stopped_B.tolist()]
        texts = [self.encoder.decode(row[:n]) for row, n in zip(ids_BT.tolist(), lengths_B.tolist(), strict=True)]
        return Rollouts(
            list(prompts),
            prompt_ids,
            ids_BT[:, :width].clone(),
            mask_BT,
            logprobs_BT[:, :width].clone(),
            finish,
            texts,
            version,
        )

    @torch.inference_mode()
    def _decode(
        self, model: PreTrainedModel, prompt_ids: list[tuple[int, ...]], keys: np.ndarray, sampling: Sampling
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        device = self.roles.device
        rows, most, width = len(prompt_ids), sampling.max_tokens, max(map(len, prompt_ids))
        distinct = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompt_ids))}
        of_B = torch.tensor([distinct[prompt] for prompt in prompt_ids], device=device)
        ids_BT = torch.zeros(rows, most, dtype=torch.long)
        logprobs_BT, lengths_B = torch.zeros(rows, most), torch.full((rows,), most)
        stopped_B = torch.zeros(rows, dtype=torch.bool)
        eos = torch.tensor(self.encoder.eos_ids)
        ids_BS, seen_BS = _left_padded(list(distinct), width, width + most, self.encoder.pad_id)
        ids_BS, seen_BS = ids_BS.to(device), seen_BS.to(device)
        places_BS = (seen_BS[:, :width].long().cumsum(1) - 1).clamp_min(0)
        cache = growing_cache(model.config, width + most)
        running = torch.arange(rows)
        weight_VH, bias_V = unembedding(model)
        step = LlamaStep(model) if supports(model, cache) else None
        padded = min(map(len, distinct)) < width
        for t in range(most):
            seen = seen_BS[:, : width + t]
            if step:
                hidden = step(ids_BS, places_BS, seen if padded else None, cache)
            else:
                hidden = model.base_model(
                    input_ids=ids_BS, attention_mask=seen, position_ids=places_BS, cache=cache, use_cache=True
                ).last_hidden_state[:, -1]
            if t == 0 and len(distinct) < rows:  # each prompt went through the model once
                hidden, seen_BS, places_BS = hidden[of_B], seen_BS[of_B], places_BS[of_B]
                select_rows(cache, of_B)
            tokens, logprobs = choose(
                project(hidden, weight_VH, bias_V), sampling.temperature, uniforms(keys[running.numpy()], t)
            )
            tokens, logprobs = tokens.cpu(), logprobs.cpu()
            ids_BT[running, t], logprobs_BT[running, t] = tokens, logprobs
            ended = torch.isin(tokens, eos) & ~stopped_B[running]
            lengths_B[running[ended]] = t + 1
            stopped_B[running[ended]] = True
            # An ended row that has not left yet decodes on; what it writes is cut by its length.
            alive = ~stopped_B[running]
            if not alive.any():
                break
            if alive.float().mean() < COMPACT_BELOW:
                keep = alive.nonzero().squeeze(1)
                running, tokens, kept = running[keep], tokens[keep], keep.to(device)
                seen_BS, places_BS = seen_BS[kept], places_BS[kept]
                select_rows(cache, kept)
            ids_BS, places_BS = tokens[:, None].to(device), places_BS[:, -1:] + 1
        inside = torch.arange(most) < lengths_B[:, None]
        return ids_BT * inside, logprobs_BT * inside, lengths_B, stopped_B


def _left_padded(prompt_ids: list[tuple[int, ...]], width: int, total: int, pad_id: int) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(prompt_ids), width), pad_id)
    seen = torch.ones(len(prompt_ids), total, dtype=torch.bool)
    for row, prompt in enumerate(prompt_ids):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        seen[row, : width - len(prompt)] = False
    return ids, seen
