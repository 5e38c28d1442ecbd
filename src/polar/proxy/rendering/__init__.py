"""Messages to token ids and back. What a bridge gives is appended to ids that exist: context seen = context trained."""

from __future__ import annotations

from pathlib import Path

import jinja2
import structlog

from polar.config import RENDERERS, TEMPLATE, check_rendering
from polar.errors import ConfigError, TaskFault
from polar.protocols import Rendering
from polar.proxy.rendering.folder import TokenizerFolder, read_folder
from polar.proxy.rendering.template import TemplateRendering

log = structlog.get_logger("polar.proxy")


def load_rendering(folder: str | Path, kind: str = TEMPLATE) -> Rendering:
    """The rendering of a tokenizer's folder: `template` uses the chat template in it, the model's own and so what its
    engines would write; `renderers:NAME` the hand-written one of that name in the package renderers, for a model whose
    folder has no template or one that is not prefix-stable. Raises ConfigError."""
    try:
        check_rendering(kind)
    except ValueError as error:
        raise ConfigError(f"rendering: {error}") from error
    contents = read_folder(Path(folder))
    if kind.startswith(RENDERERS):
        from polar.proxy.rendering.renderers_package import RenderersRendering

        return RenderersRendering(contents, kind.removeprefix(RENDERERS))
    return _template(contents)


def _template(contents: TokenizerFolder) -> Rendering:
    folder = contents.name
    if not contents.template:
        raise ConfigError(f"{folder} has no chat template: add chat_template.jinja, or chat_template in its config")
    try:
        rendering = TemplateRendering(contents)
        for note in rendering.notes:
            log.warning("chat template", folder=folder, note=note)
    except (jinja2.TemplateError, TaskFault) as error:
        raise ConfigError(f"the chat template of {folder} cannot be used: {error}") from error
    except Exception as error:  # the tokenizers library has no error type of its own
        raise ConfigError(f"{folder}/tokenizer.json cannot be read: {error}") from error
    return rendering
