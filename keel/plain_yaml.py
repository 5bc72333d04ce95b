"""YAML whose values stay text until a setting's own type reads them, as flags do, and the lines where they stand.

YAML 1.1, which the library reads, takes 010 for eight, 1:30 for ninety, 1e-4 for a text and `off` for false. Here null
alone (`null`, `~`, nothing) is told from text.
"""

from collections.abc import Sequence
from typing import Any

import yaml

_KEPT = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would keep the last in silence."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # an instance's, in the library's own terms
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _KEPT]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """See yaml.SafeLoader."""
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


class Document:
    """One document: its `value`, and where its parts stand.

    Raises what yaml does where the text is none: YAMLError, ValueError, AttributeError, TypeError, RecursionError.
    """

    def __init__(self, text: str):
        loader = _Loader(text)
        try:
            self._root = loader.get_single_node()
            self.value: Any = None if self._root is None else loader.construct_document(self._root)
        finally:
            loader.dispose()

    def line(self, keys: Sequence[int | str]) -> int | None:
        """The line of the last of these keys that the document has; None where it has none of them."""
        node, line = self._root, None
        for key in keys:
            if isinstance(node, yaml.MappingNode):
                found = next((pair for pair in node.value if pair[0].value == str(key)), None)
            elif isinstance(node, yaml.SequenceNode) and isinstance(key, int):
                found = (node.value[key], node.value[key])
            else:
                found = None
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        return line
