"""Messages to token ids and back. What a bridge gives is appended to ids that exist: context seen = context trained."""

from __future__ import annotations

from pathlib import Path

import jinja2

from polar.errors import ConfigError, TaskFault
from polar.protocols import Rendering
from polar.proxy.rendering.folder import read_folder
from polar.proxy.rendering.template import TemplateRendering


def load_rendering(folder: str | Path) -> Rendering:
    """The rendering of a tokenizer's folder (tokenizer.json and a chat template). Raises ConfigError."""
    contents = read_folder(Path(folder))
    try:
        return TemplateRendering(contents)
    except (jinja2.TemplateError, TaskFault) as error:
        raise ConfigError(f"the chat template of {folder} cannot be used: {error}") from error
    except Exception as error:  # the tokenizers library has no error type of its own
        raise ConfigError(f"{folder}/tokenizer.json cannot be read: {error}") from error
