"""Four roles on one backbone: a frozen base, and a LoRA adapter with a head for each role but the reference.

The reference is the base alone. Switching a role flips which adapter is in force; no base weight is ever written, so
the reference stays byte-identical.
"""

import warnings
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.errors import ModelError
from keel.models.heads import ScalarHead
from keel.models.roles import HEADED, Role
from keel.models.weights import HEAD_FILE, export_causal_lm, hash_tensors, load_head, save_head

ADAPTER_FILE = "adapter_model.safetensors"


class SharedRoles:
    """All roles on one base. `roles.Roles` says what each method does."""

    def __init__(
        self,
        base: PreTrainedModel,
        roles: Collection[Role],
        trainable: Collection[Role],
        rank: int,
        alpha: float,
        seed: int,
    ):
        """Injects one adapter per role (none for the reference); fresh adapters change nothing until they are trained.

        Asserts that every trainable role has an adapter. The same seed gives the same adapters.
        """
        self.base, self.roles, self.trainable, self.device = base, frozenset(roles), frozenset(trainable), base.device
        self.base_state = dict(base.state_dict(keep_vars=True))  # before injection: the names of a plain model
        self.active: Role | None = None
        assert self.trainable <= self.roles - {"reference"}
        self.config = LoraConfig(
            r=rank,
            lora_alpha=alpha,  # pyright: ignore[reportArgumentType]  # declared int, but only ever divided by r
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        hidden = base.config.get_text_config().hidden_size
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            for place, role in enumerate(sorted(self.roles - {"reference"})):
                torch.manual_seed(seed + place)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters are the point
                    inject_adapter_in_model(self.config, base, adapter_name=role)
        self.layers = [m for m in base.modules() if isinstance(m, BaseTunerLayer)]
        self.heads = {
            r: ScalarHead(hidden, generator if r == "reward" else None).to(base.device)
            for r in sorted(self.roles.intersection(HEADED))
        }
        self.adapters: dict[Role, dict[str, nn.Parameter]] = {
            r: self._adapter(r) for r in sorted(self.roles - {"reference"})
        }
        for own in self.adapters.values():
            for parameter in own.values():
                parameter.data = parameter.data.float()
        self._freeze()

    def _adapter(self, role: Role) -> dict[str, nn.Parameter]:
        part = f".{role}."
        return {n.replace(part, "."): p for n, p in self.base.named_parameters() if "lora_" in n and part in n}

    def _freeze(self) -> None:
        for parameter in self.base.parameters():
            parameter.requires_grad_(False)
        for role in self.roles - {"reference"}:
            for parameter in self.parameters(role).values():
                parameter.requires_grad_(role in self.trainable)

    def has(self, role: Role) -> bool:
        """Whether the role was built."""
        return role in self.roles

    def model(self, role: Role) -> PreTrainedModel:
        """The base with that role's adapter in force, or with none for the reference."""
        assert role in self.roles, role
        if role == self.active:
            return self.base
        self.active = role
        for layer in self.layers:
            layer.enable_adapters(role != "reference")
            if role != "reference":
                layer.set_adapter(role)
        self._freeze()
        return self.base

    def head(self, role: Role) -> ScalarHead:
        """The scalar head of critic or reward model."""
        return self.heads[role]

    def parameters(self, role: Role) -> dict[str, nn.Parameter]:
        """Adapter and head of the role; nothing for the reference."""
        own = dict(self.adapters.get(role, {}))
        if role in self.heads:
            own |= {f"head.{name}": p for name, p in self.heads[role].named_parameters()}
        return own

    def workers(self, role: Role) -> int:
        """One: the roles take turns on one base."""
        return 1

    def rest(self) -> None:
        """Nothing: the frozen roles are the base that the others need."""

    def fingerprint(self, role: Role) -> str:
        """SHA-256 of the base's weights with the role's own."""
        return hash_tensors({f"base.{n}": t for n, t in self.base_state.items()} | self.parameters(role))

    def export(self, role: Role, folder: Path) -> None:
        """Writes base plus adapter, added in float32, as a plain model; the base itself is not touched."""
        state = {name: tensor.detach() for name, tensor in self.base_state.items()}
        export_causal_lm(self.base, state, folder, () if role == "reference" else self._merged(role))

    def _merged(self, role: Role) -> Iterator[tuple[str, Tensor]]:
        for name, module in self.base.named_modules():
            if isinstance(module, BaseTunerLayer):
                assert isinstance(module, LoraLinear), type(module)
                weight = module.get_base_layer().weight
                assert isinstance(weight, Tensor), name
                merged = weight.detach().float() + module.get_delta_weight(role).detach().float()
                yield f"{name}.weight", merged.to(weight.dtype)

    def save_headed(self, role: Role, folder: Path) -> None:
        """Writes the role's adapter (as peft lays it out) and head, to be read by `load_headed`."""
        folder.mkdir(parents=True, exist_ok=True)
        adapter = get_peft_model_state_dict(self.base, adapter_name=role)
        save_file({n: t.detach().cpu().contiguous() for n, t in adapter.items()}, folder / ADAPTER_FILE)
        self.config.save_pretrained(str(folder))
        save_head(self.heads[role], folder / HEAD_FILE)

    def load_headed(self, folder: Path, roles: Collection[Role]) -> None:
        """Gives the roles the adapter and head in `folder`. Raises ModelError where a weight is missing, unknown or of
        another shape."""
        adapter = load_file(folder / ADAPTER_FILE)
        head = load_head(folder / HEAD_FILE, self.base.config.get_text_config().hidden_size, self.device)
        wanted = {name: tensor.shape for name, tensor in adapter.items()}
        for role in roles:
            ours = get_peft_model_state_dict(self.base, adapter_name=role)
            if {name: tensor.shape for name, tensor in ours.items()} != wanted:
                raise ModelError(
                    "the reward model's adapter does not fit this base",
                    where=str(folder),
                    remedy="run the reward stage again with this model",
                )
            set_peft_model_state_dict(self.base, adapter, adapter_name=role)
            self.heads[role].load_state_dict(head.state_dict())
        self._freeze()
