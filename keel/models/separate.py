"""One full model per role: full fine-tuning, four times the weights. Frozen ones may rest between uses."""

import copy
from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from keel.models.heads import ScalarHead
from keel.models.resting import Resting
from keel.models.roles import HEADED, Role
from keel.models.side_by_side import workers_for
from keel.models.weights import HEAD_FILE, hash_tensors, load_head, save_head


class SeparateRoles:
    """Every role is a model of its own. `roles.Roles` says what each method does."""

    def __init__(
        self,
        models: dict[Role, PreTrainedModel],
        heads: dict[Role, ScalarHead],
        trainable: Collection[Role],
        rest_in: Path | None = None,
    ):
        """rest_in: a folder on a real disk for the weights of frozen roles, which then leave memory with `rest`."""
        self.models, self.heads, self.trainable = models, heads, frozenset(trainable)
        self.device = next(iter(models.values())).device
        for role in models:
            for parameter in self.parameters(role).values():
                parameter.requires_grad_(role in self.trainable)
        self.resting = {r: Resting(models[r], rest_in) for r in models if rest_in and r not in self.trainable}

    @classmethod
    def build(
        cls,
        start: PreTrainedModel,
        roles: Collection[Role],
        trainable: Collection[Role],
        seed: int,
        reward: tuple[PreTrainedModel, ScalarHead] | None = None,
        rest_in: Path | None = None,
    ) -> "SeparateRoles":
        """Roles that all start from `start`; reward and critic from `reward` where it is given, else with new heads.

        `start` and the reward model are taken over, copies are made only for the roles beyond them.
        """
        models: dict[Role, PreTrainedModel] = {}
        heads: dict[Role, ScalarHead] = {}
        used: set[int] = set()
        for role in roles:
            source = reward[0] if reward and role in HEADED else start
            models[role] = copy.deepcopy(source) if id(source) in used else source
            used.add(id(source))
            if role in HEADED:
                heads[role] = copy.deepcopy(reward[1]) if reward else new_head(start, role, seed)
        return cls(models, heads, trainable, rest_in)

    def has(self, role: Role) -> bool:
        """Whether the role was built."""
        return role in self.models

    def model(self, role: Role) -> PreTrainedModel:
        """The role's model."""
        if role in self.resting:
            self.resting[role].wake()
        return self.models[role]

    def head(self, role: Role) -> ScalarHead:
        """The scalar head of critic or reward model."""
        return self.heads[role]

    def parameters(self, role: Role) -> dict[str, nn.Parameter]:
        """All weights of the role's model and head."""
        own = dict(self.models[role].named_parameters())
        if role in self.heads:
            own |= {f"head.{name}": p for name, p in self.heads[role].named_parameters()}
        return own

    def workers(self, role: Role) -> int:
        """As many as the machine's threads for a small model."""
        return workers_for(self.models[role], self.device)

    def rest(self) -> None:
        """Gives back the memory of the frozen roles that may rest."""
        for resting in self.resting.values():
            resting.rest()

    def fingerprint(self, role: Role) -> str:
        """SHA-256 of all weights of the role."""
        found = hash_tensors(self.parameters(role))
        self.rest()
        return found

    def export(self, role: Role, folder: Path) -> None:
        """Writes the role's causal language model as a plain folder."""
        self.models[role].save_pretrained(folder)

    def save_headed(self, role: Role, folder: Path) -> None:
        """Writes a model with its head, to be read by `load_headed`."""
        self.export(role, folder)
        save_head(self.heads[role], folder / HEAD_FILE)


def load_headed(model: PreTrainedModel, folder: Path) -> tuple[PreTrainedModel, ScalarHead]:
    """The head that `save_headed` wrote, beside the model that was loaded from the same folder."""
    return model, load_head(folder / HEAD_FILE, model.config.get_text_config().hidden_size, model.device)


def new_head(model: PreTrainedModel, role: Role, seed: int) -> ScalarHead:
    """The head of a role that nothing is known of: random for a reward model, zero for a critic."""
    generator = torch.Generator().manual_seed(seed) if role == "reward" else None
    return ScalarHead(model.config.get_text_config().hidden_size, generator).to(model.device)
