"""Classic control tasks (gymnasium) on the same `algo` functions: PPO, TRPO and REINFORCE.

How the language-model shapes serve here: a piece of an episode inside one rollout is a row `B` (a response there), its
steps are `T` (tokens there), `N` is all steps of all rows packed. Two axes more: `E` environments side by side, `O`
numbers of an observation, `A` actions (discrete) or numbers of an action (continuous).
"""
