"""Every setting of Keel: one pydantic tree, one docstring a field (meaning, unit, where the default comes from).

Neither torch nor the rest of Keel is imported here, so that a recipe is read, shown or refused at once. A setting that
would do nothing is refused with the reason. Fields that are null until `Recipe.resolved` fills them have a default that
depends on another field.
"""

from keel.config.base import Fraction, NonNegative, Positive, Rate, Section, Threads, refuse
from keel.config.online import (
    GROUPED,
    CriticConfig,
    KlConfig,
    PolicyConfig,
    PpoConfig,
    PtxConfig,
    ScoringConfig,
    is_remote,
)
from keel.config.recipe import Recipe, usable_cores
from keel.config.stages import (
    EvalConfig,
    ModelConfig,
    PreferenceConfig,
    RewardConfig,
    SandboxConfig,
    SftConfig,
    SourceConfig,
)

__all__ = [
    "GROUPED",
    "CriticConfig",
    "EvalConfig",
    "Fraction",
    "KlConfig",
    "ModelConfig",
    "NonNegative",
    "PolicyConfig",
    "Positive",
    "PpoConfig",
    "PreferenceConfig",
    "PtxConfig",
    "Rate",
    "Recipe",
    "RewardConfig",
    "SandboxConfig",
    "ScoringConfig",
    "Section",
    "SftConfig",
    "SourceConfig",
    "Threads",
    "is_remote",
    "refuse",
    "usable_cores",
]
